"""Transports by URI: known ones, refused ones, and that another package can add one."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from baton.errors import ConfigError
from baton.transports import registry
from baton.transports.mapped.local import LocalTransport
from baton.transports.registry import (
    check_device,
    create_transport,
    default_integrity,
    parse_uri,
    require_keys,
    with_path,
)


@pytest.mark.parametrize("uri", ["nixl", "mooncake://", "file:///mnt/kv", "faulty+nixl://?fault=fail"])
def test_transports_beyond_shared_memory_need_keys(uri: str) -> None:
    require_keys(uri, True, "kv_transport")
    with pytest.raises(ConfigError, match=r"kv_transport: \w+ needs --keys DIR"):
        require_keys(uri, False, "kv_transport")
    for own in ("shm", "local://", "faulty+shm://?fault=fail"):
        require_keys(own, False, "kv_transport")


@pytest.mark.parametrize(
    ("uri", "scheme"),
    [
        ("local://", "local"),
        ("shm", "shm"),
        ("shm://", "shm"),
        ("SHM://", "shm"),
        ("faulty+local://?fault=drop-draft", "faulty+local"),
    ],
)
def test_known_schemes_make_transports(uri: str, scheme: str) -> None:
    transport = create_transport(uri)
    assert transport.scheme == scheme
    transport.close()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "expected a name or scheme://"),
        (
            "shm:",
            "expected a name or scheme://?option=value, got 'shm:'; known: cuda_ipc, file, local, mooncake, nixl, shm",
        ),
        ("shm/", "expected a name or scheme://"),
        ("shm?a=1", "expected a name or scheme://"),
        ("shm://host", "expected a name or scheme://"),
        ("shm://[", "expected a name or scheme://"),
        ("shm:///path", "shm has no option 'path'"),
        ("file:///a?path=/b", "given twice"),
        ("file:////a", "expected a name or scheme://"),
        ("tcp", "unknown transport 'tcp'; known: cuda_ipc, file, local, mooncake, nixl, shm"),
        ("tcp://", "unknown transport 'tcp'; known: cuda_ipc, file, local, mooncake, nixl, shm"),
        ("shm://?threads=2", "shm has no option 'threads'"),
        ("shm://?a=1&a=2", "given twice"),
        ("slow+shm", "unknown wrapper 'slow'"),
        ("faulty+tcp", "unknown transport 'tcp'"),
        ("faulty+shm", "fault"),
        ("faulty+shm://?fault=typo", "faulty: Invalid enum value 'typo'"),
        ("faulty+shm://?fault=drop&every=0", "out of range"),
        ("faulty+shm://?fault=drop&region=x", "faulty: Expected `int"),
        ("faulty+local://?fault=drop&more=1", "local has no option 'more'"),
    ],
)
def test_refusals_name_the_cause(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match="transport: ") as caught:
        create_transport(uri)
    assert message in str(caught.value)


def test_a_path_is_an_option() -> None:
    assert parse_uri("file:///mnt/my%20kv?max_bytes=9") == ("file", {"path": "/mnt/my kv", "max_bytes": "9"})
    assert parse_uri("file:///") == parse_uri("file") == ("file", {})


@pytest.mark.parametrize(
    ("given", "path"),
    [("file", "/own dir"), ("faulty+file://?fault=drop", "/own dir"), ("file:///mnt/kv", "/mnt/kv"), ("shm", None)],
)
def test_a_default_holds_for_its_scheme_and_where_nothing_is_given(given: str, path: str | None) -> None:
    scheme, query = parse_uri(with_path(given, "/own dir"))
    before = parse_uri(given)
    assert (scheme, query.get("path")) == (before[0], path)
    assert query.items() >= before[1].items()


def test_entry_points_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"mine": f"{__name__}:make_mine", "gone": "nowhere:create", "bare": f"{__name__}:nothing"}
    values["fails"] = f"{__name__}:fail"
    points = [EntryPoint(name, value, registry.__name__) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "baton.transports" else [])
    for uri in ("mine://?speed=fast", "faulty+mine://?speed=fast&fault=drop"):
        create_transport(uri).close()
    with pytest.raises(ConfigError, match="known: bare, cuda_ipc, fails, file, gone, local, mine, mooncake, nixl, shm"):
        create_transport("yours")
    with pytest.raises(ConfigError, match="transport: gone: nowhere:create: ModuleNotFoundError: No module named"):
        create_transport("gone")
    with pytest.raises(ConfigError, match=r"bare: .* AttributeError: "):
        create_transport("bare")
    with pytest.raises(ConfigError, match=r"transport: fails: .*:fail: OSError: \[Errno 5\] no card"):
        create_transport("fails")


def make_mine(query: dict[str, str]) -> LocalTransport:
    assert query == {"speed": "fast"}
    return LocalTransport()


def fail(query: dict[str, str]) -> LocalTransport:
    raise OSError(5, "no card")


def test_transports_are_imported_lazily() -> None:
    code = (
        "import sys, baton.transports.registry\n"
        "assert not {'baton.transports.mapped.shm', 'baton.transports.mapped.mover', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("uri", "integrity"),
    [("shm", "off"), ("local://", "off"), ("faulty+shm://?fault=drop", "off"), ("file:///mnt/kv", "sampled")]
    + [(name, "sampled") for name in ("nixl", "mooncake", "faulty+file://?fault=drop")],
)
def test_transports_over_a_network_or_disk_are_sampled_by_default(uri: str, integrity: str) -> None:
    assert default_integrity(uri) == integrity


@pytest.mark.parametrize(
    ("uri", "device", "fits"),
    [
        ("shm", "cpu", True),
        ("shm", "cuda", False),
        ("faulty+shm://?fault=drop", "cuda:1", False),
        ("faulty+cuda_ipc://?fault=drop", "cuda", False),
        ("faulty+nixl://?fault=drop", "cuda:0", False),
        ("faulty+nixl://?fault=drop", "cpu", True),
        ("file:///mnt/kv", "cuda", False),
        ("cuda_ipc", "cuda", True),
        ("cuda_ipc://", "cpu", False),
        ("nixl", "cpu", True),
        ("nixl", "cuda:0", True),
    ],
)
def test_a_transport_that_does_not_open_the_devices_memory_is_refused(uri: str, device: str, fits: bool) -> None:
    if fits:
        check_device(uri, device, "kv_transport")
        return
    with pytest.raises(ConfigError, match=f"kv_transport: .* does not open memory of {device}; these do: "):
        check_device(uri, device, "kv_transport")
