"""Transports by URI: what is known, what is refused, and that another package can add one."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from baton.errors import ConfigError
from baton.transports import registry
from baton.transports.local import LocalTransport
from baton.transports.registry import create_transport


@pytest.mark.parametrize(
    ("uri", "scheme"),
    [("local://", "local"), ("shm://", "shm"), ("faulty+local://?fault=drop-draft", "faulty+local")],
)
def test_known_schemes(uri: str, scheme: str) -> None:
    transport = create_transport(uri)
    assert transport.scheme == scheme
    transport.close()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "expected scheme"),
        ("shm", "expected scheme"),
        ("shm:", "expected scheme"),
        ("shm://host", "expected scheme"),
        ("tcp://", "unknown transport 'tcp'; known: file, local, mooncake, nixl, shm"),
        ("shm://?threads=2", "shm has no option 'threads'"),
        ("shm://?a=1&a=2", "given twice"),
        ("slow+shm://", "unknown wrapper 'slow'"),
        ("faulty+shm://", "fault"),
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


def test_entry_point_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:make_mine", registry.__name__)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "baton.transports" else [])
    transport = create_transport("mine://?speed=fast")
    assert isinstance(transport, LocalTransport)
    transport.close()


def make_mine(query: dict[str, str]) -> LocalTransport:
    assert query == {"speed": "fast"}
    return LocalTransport()


def test_transports_are_imported_lazily() -> None:
    code = (
        "import sys, baton.transports.registry\n"
        "assert not {'baton.transports.shm', 'baton.transports.mover', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
