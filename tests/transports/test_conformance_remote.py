"""The suite over transports that use a library or a store, with each peer in another process."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import Future
from pathlib import Path

import pytest

from baton.kvstore.store import FileStore, content_key
from baton.testing import check_store, check_transport
from baton.testing.conformance import main
from baton.testing.transport_peer import pattern
from baton.testing.transport_suite import check_names
from baton.transports.base import Peer
from baton.transports.registry import create_transport
from baton.transports.remote.remote_transport import RemoteTransport
from testkit.handoffs.remote_uris import FORKABLE, SCHEMES, uri_of
from testkit.processes.baton_forks import forking
from testkit.processes.launcher import Launcher


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("check", check_names())
def test_remote_transports_conform_across_processes(
    scheme: str, check: str, tmp_path: Path, launcher: Launcher
) -> None:
    uri = uri_of(scheme, tmp_path)
    with forking(launcher) if check in FORKABLE else contextlib.nullcontext():
        assert check_transport(lambda: create_transport(uri), spawn_uri=uri, only=[check]) == [check]


def test_nixl_over_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over UCX's TCP the receiving process moves the bytes: it must be woken, and drained after a peer died."""
    uri = uri_of("nixl", tmp_path)
    monkeypatch.setenv("UCX_TLS", "tcp")
    names = ["copies_exactly", "survives_a_peer_killed_while_copying", "done_means_visible"]
    assert len(check_transport(lambda: create_transport(uri), spawn_uri=uri, only=names)) == 3


def test_file_in_one_process(tmp_path: Path) -> None:
    uri = uri_of("file", tmp_path)
    assert check_transport(lambda: create_transport(uri)) == check_names()


def test_a_transport_that_waits_for_its_peer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = uri_of("file", tmp_path)
    connect = RemoteTransport.connect

    def waiting(self: RemoteTransport, descriptor: bytes) -> Future[Peer]:
        future = connect(self, descriptor)
        future.exception(30)
        return future

    monkeypatch.setattr(RemoteTransport, "connect", waiting)
    with pytest.raises(AssertionError, match=r"^waits_for_no_peer: .* wait for no peer"):
        check_transport(lambda: create_transport(uri), spawn_uri=uri, only=["waits_for_no_peer"])


def test_the_file_store_conforms() -> None:
    assert len(check_store(FileStore)) == 7


def test_store_that_keeps_nothing_in_order_is_found() -> None:
    class Forgetful(FileStore):
        def _touch(self, path: Path) -> bool:
            return path.exists()

    with pytest.raises(AssertionError, match=r"^evicts_by_size: expected that what was used last stays"):
        check_store(Forgetful)


def test_the_store_does_not_look_through_its_directory_for_each_entry(tmp_path: Path) -> None:
    looks = 0

    class Counted(FileStore):
        def _entries(self) -> list[tuple[float, int, Path]]:
            nonlocal looks
            looks += 1
            return super()._entries()

    store = Counted(tmp_path, max_bytes=1 << 20)
    for i in range(200):
        store.put({"x": pattern(256, i)})
    assert looks < 10


def test_content_keys_name_context_and_tokens() -> None:
    contexts = ["model", "other", content_key("model", [1])]
    keys = {content_key(context, tokens) for context in contexts for tokens in ([], [1], [1, 2], [258], [2, 1])}
    assert len(keys) == 15
    assert all(re.fullmatch("[0-9a-f]{32}", key) for key in keys)
    assert content_key("model", [1, 2]) == content_key("model", (1, 2))


def test_a_failed_check_is_named_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "faulty+local://?fault=drop"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "local", "faulty+local"]
    assert lines[1].split() == ["copies_exactly", lines[1].split()[1], "s", "FAILED"]
    assert any(line.startswith("faulty+local: copies_exactly: expected that") for line in lines)


def test_table_keeps_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    """Also for one transport with other options, and for one that raises an unexpected exception."""
    assert main(["faulty+local://?fault=drop", "faulty+local://?fault=delay&delay_s=0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "faulty+local", "faulty+local"]
    assert lines[1].split()[:2] == ["copies_exactly", "FAILED"]


def test_table_of_a_transport_that_breaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: object, name: str, nbytes: int) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr("baton.transports.mapped.local.LocalTransport.allocate", allocate)
    assert main(["local"]) == 1
    assert "local: copies_exactly: ZeroDivisionError: no" in capsys.readouterr().out


def test_table_of_a_transport_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shm", "tcp"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert (
        streams.err == "error: transport: unknown transport 'tcp'; known: cuda_ipc, file, local, mooncake, nixl, shm\n"
    )


def test_table_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    assert main(["mooncake"]) == 0
    out = capsys.readouterr().out
    assert "mooncake: not run: transport: mooncake:// needs the package mooncake-transfer-engine-non-cuda" in out
