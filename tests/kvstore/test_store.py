"""The store of `file` if the disk, the directory or another process misbehaves."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError, TransportError
from baton.kv.geometry import CopyList
from baton.kvstore.store import KEEP_S, FileStore
from baton.testing.transport_peer import pattern
from baton.transports.batches import Runs
from baton.transports.registry import create_transport
from baton.transports.remote.file import FileLibrary
from baton.transports.remote.remote_transport import RemoteTransport
from testkit.inside import library_of
from testkit.waiting import eventually


def age(path: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_entry_that_cannot_be_read_is_not_damaged(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    key = store.put({"x": pattern(64, 1)})

    def refuse(*arguments: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(TransportError, match=f"cannot be read: {os.strerror(code)}"):
            store.get(key)
    assert store.get(key) is not None


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    # The error of write() on a full disk comes from a real one.
    monkeypatch.setattr("baton.kvstore.store.open", lambda fd, mode, closefd: _full(fd), raising=False)
    with pytest.raises(TransportError, match=r"cannot write to the store .*: No space left on device"):
        store.put({"x": pattern(64, 1)})
    assert list(tmp_path.iterdir()) == []


def _full(fd: int) -> Any:
    os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
    return os.fdopen(fd, "wb", closefd=False)


def test_a_directory_that_is_gone_is_an_error_of_the_transport(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv")
    (tmp_path / "kv").rmdir()
    with pytest.raises(TransportError, match=r"cannot write to the store .*: No such file"):
        store.put({"x": pattern(64, 1)})
    assert store.get("00" * 16) is None


def test_old_entries_go_and_those_of_the_last_seconds_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Young entries may be on their way to a reader; they are few enough for a store to accept all new entries."""
    assert KEEP_S <= 5  # 8 GiB, the default, take 1.6 GiB/s
    monkeypatch.setattr("baton.kvstore.store.KEEP_S", 600.0)  # a slow disk may take seconds for a few entries
    store = FileStore(tmp_path, 4096)
    keys = [store.put({"x": pattern(800, i)}) for i in range(4)]
    with pytest.raises(TransportError, match="full of entries of the last 600 seconds"):
        store.put({"x": pattern(800, 9)})
    assert sorted(store.keys()) == sorted(keys)
    age(tmp_path / keys[2], 601)
    store.put({"x": pattern(800, 9)})
    left = set(store.keys())
    assert left >= {keys[0], keys[1], keys[3]}
    assert keys[2] not in left


def test_entries_of_the_future_go_first(tmp_path: Path) -> None:
    """The clock was set back, or another host's is ahead."""
    store = FileStore(tmp_path, 4096)
    keys = [store.put({"x": pattern(800, i)}) for i in range(4)]
    for key, seconds in zip(keys, (-7200, 1, -7201, -1), strict=True):
        age(tmp_path / key, seconds)
    (part := tmp_path / f"{'0' * 32}.tmp").touch()
    age(part, -7200)
    store.put({"x": pattern(800, 9)})
    left = set(store.keys())
    assert keys[0] not in left
    assert left >= {keys[1], keys[2], keys[3]}
    assert not part.exists()


def test_an_entry_that_is_used_while_room_is_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = FileStore(tmp_path, 4096), FileStore(tmp_path, 4096)
    keys = [store.put({"x": pattern(800, i)}) for i in range(4)]
    for i, key in enumerate(keys):
        age(tmp_path / key, 100 - i)
    look = FileStore._entries

    def slow(self: FileStore) -> list[tuple[float, int, Path]]:
        found = look(self)
        assert other.use(keys[0])
        other.remove(keys[1])
        return found

    monkeypatch.setattr(FileStore, "_entries", slow)
    store.put({"x": pattern(800, 9)})
    assert set(store.keys()) >= {keys[0], keys[2], keys[3]}, "one that was used, and the room that another made counts"


def test_files_that_cannot_be_removed_leave_the_store_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, 4096)
    keys = [store.put({"x": pattern(800, i)}) for i in range(4)]
    for key in keys:
        age(tmp_path / key, 100)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(TransportError, match="is full"):
        store.put({"x": pattern(800, 9)})


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///tmp/a%00b", "cannot use the directory /tmp/a\0b: embedded null byte"),
        ("file://?path=~nobody-here/kv", "cannot use the directory ~nobody-here/kv: Could not determine"),
        ("file://?path=", "Expected `str` of length >= 1 - at `$.path`"),
    ],
)
def test_paths_that_are_none_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        create_transport(uri)


# ---------------------------------------------------------------- the transport over the store


def pair(directory: Path) -> tuple[RemoteTransport, RemoteTransport]:
    sides = [create_transport(f"file://{directory}/kv") for _ in range(2)]
    assert all(isinstance(side, RemoteTransport) for side in sides)
    return sides[0], sides[1]  # type: ignore[return-value]


def test_every_request_is_answered_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails at the peer: without an answer, a copy and its pages would wait for the peer's death."""
    near, far = pair(tmp_path)
    try:
        near.register([near.allocate("near", 64)])
        peer = near.connect(far.register([far.allocate("far", 64)])).result(60)

        def fail(*arguments: Any) -> None:
            raise MemoryError

        assert isinstance(library_of(far), FileLibrary)
        monkeypatch.setattr(library_of(far), "_fetch", fail)
        operation = near.submit(peer, "write", CopyList(0, 0, *[np.array([8], dtype=np.int64)] * 3))
        assert operation.wait(60) == "failed"
        assert operation.error == "MemoryError"
        assert peer.alive()
        assert isinstance(library_of(near), FileLibrary)
        while library_of(near)._asked:  # until the driver's thread has released the batch
            time.sleep(0.005)
    finally:
        far.close()
        near.close()


def test_nothing_is_written_for_one_who_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that lost the line may have told this engine, by another way, that its pages are free."""
    near, far = pair(tmp_path)
    reading, go_on, get = threading.Event(), threading.Event(), FileStore.get
    memory = far.allocate("far", 64)
    try:
        own = near.allocate("near", 64)
        own[:] = 7
        near.register([own])
        peer = near.connect(far.register([memory])).result(60)

        def slow(self: FileStore, key: str) -> Any:
            entry = get(self, key)
            reading.set()
            assert go_on.wait(60)
            return entry

        monkeypatch.setattr(FileStore, "get", slow)
        operation = near.submit(peer, "write", CopyList(0, 0, *[np.array([8], dtype=np.int64)] * 3))
        assert reading.wait(60)
        peer.line.abort()  # type: ignore[attr-defined]
        assert operation.wait(60) == "failed"
    finally:
        go_on.set()
        far.close()
        near.close()
    assert not memory.any()


def test_text_that_is_none_ends_the_line(tmp_path: Path) -> None:
    near, far = pair(tmp_path)
    try:
        near.register([near.allocate("near", 64)])
        peer = near.connect(far.register([far.allocate("far", 64)])).result(60)
        runs: Runs = np.array([[1], [8]], dtype=np.int64)
        frame = msgspec.msgpack.encode(["ask", 1, "write", "key", runs.tobytes()]).replace(b"key", b"k\xffy")
        peer.line.send(frame)  # type: ignore[attr-defined]
        eventually(lambda: not peer.alive())
    finally:
        far.close()
        near.close()
