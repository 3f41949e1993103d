"""The store if calls of the operating system fail: each call of `put` and `get` once, with each error."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import TransportError
from baton.kv.geometry import CopyList
from baton.kvstore.store import Entry, FileStore
from baton.kvstore.threads import started_executor
from baton.testing.transport_peer import pattern
from baton.transports.registry import create_transport
from testkit.processes.leftovers import files_left_open, open_files

OLD, NEW = {"x": pattern(64, 0)}, {"x": pattern(64, 1)}
CALLS = {"open", "close", "utime", "rename", "scandir", "fstat", "read", "write"}


class Failing:
    """The modules `os` and `open` of the store. The `at`th call fails with `code`; a failed `close` closes, as on
    Linux. `failed`: the name of that call.
    """

    def __init__(self, at: int, code: int) -> None:
        self.made, self.failed = 0, ""
        self._at, self._code = at, code

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        return self.counted(name, call) if name in CALLS else call

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            self.made += 1
            if self.made != self._at:
                return call(*arguments, **named)
            self.failed = name
            if name == "close":
                call(*arguments)
            raise OSError(self._code, os.strerror(self._code))

        return made

    @contextlib.contextmanager
    def file(self, *arguments: Any, **named: Any) -> Any:
        with open(*arguments, **named) as file:
            yield FailingFile(self, file)


class FailingFile:
    def __init__(self, calls: Failing, file: Any) -> None:
        self.read, self.write = calls.counted("read", file.read), calls.counted("write", file.write)


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except TransportError as error:
        return error


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_whichever_call_fails_entries_are_whole_and_nothing_is_left(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: set[str] = set()
    before, at = open_files(), 0
    while True:
        at += 1
        old = FileStore(tmp_path / str(at)).put(OLD)
        store = FileStore(tmp_path / str(at))  # which has not looked for room yet
        calls = Failing(at, code)
        with monkeypatch.context() as patch:
            patch.setattr("baton.kvstore.store.os", calls)
            patch.setattr("baton.kvstore.store.open", calls.file, raising=False)
            new = attempt(lambda store=store: store.put(NEW))
            got = attempt(lambda store=store, old=old: store.get(old))
        assert isinstance(new, str | TransportError)
        assert isinstance(got, TransportError) or np.array_equal(got.tensors["x"], OLD["x"])
        left = sorted(path.name for path in store.directory.iterdir())
        assert left == sorted([old, *([new] if isinstance(new, str) else [])])
        for tensors in (OLD, NEW):
            entry = store.get(store.put(tensors))
            assert isinstance(entry, Entry)
            assert np.array_equal(entry.tensors["x"], tensors["x"])
        assert not files_left_open(before)
        if not calls.failed:
            break
        failed.add(calls.failed)
    assert failed == CALLS


def test_a_file_that_is_cut_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    key = store.put(OLD)

    @contextlib.contextmanager
    def cut(fd: int, *arguments: Any, **named: Any) -> Any:
        os.truncate(tmp_path / key, 100)
        with open(fd, *arguments, **named) as file:
            yield file

    monkeypatch.setattr("baton.kvstore.store.open", cut, raising=False)
    with pytest.raises(TransportError, match="is damaged"):
        store.get(key)
    assert store.keys() == []


def test_a_directory_in_place_of_an_entry_takes_no_descriptor(tmp_path: Path) -> None:
    store, key = FileStore(tmp_path), "ab" * 16
    (tmp_path / key).mkdir()
    before = open_files()
    with pytest.raises(TransportError, match="not a regular file"):
        store.get(key)
    assert not files_left_open(before)


def test_all_threads_run_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has no thread left refuses the start of an engine, and no call of a running one."""
    start, left = threading.Thread.start, 2

    def scarce(self: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    with started_executor(3, "x") as executor:
        monkeypatch.setattr(threading.Thread, "start", scarce)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            started_executor(3, "y")
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("y")]
        assert [future.result(60) for future in [executor.submit(int, i) for i in range(9)]] == [*range(9)]


def test_copies_need_no_new_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose thread cannot be started would count as never begun, and run later into pages of others."""
    near, *others = (create_transport(f"file://{tmp_path}/kv") for _ in range(3))
    began, go_on, put = threading.Event(), threading.Event(), FileStore.put

    def slow(self: FileStore, *arguments: Any) -> str:
        """The first one holds its thread."""
        if not began.is_set():
            began.set()
            assert go_on.wait(60)
        return put(self, *arguments)

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        near.register([near.allocate("near", 64)])
        peers = [near.connect(far.register([far.allocate("far", 64)])).result(60) for far in others]
        monkeypatch.setattr(FileStore, "put", slow)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        copies = CopyList(0, 0, *[np.array([8], dtype=np.int64)] * 3)
        first = near.submit(peers[0], "write", copies)
        assert began.wait(60)
        second = near.submit(peers[1], "write", copies)
        assert second.wait(60) == "done", second.error
        go_on.set()
        assert first.wait(60) == "done", first.error
    finally:
        go_on.set()
        monkeypatch.undo()
        for transport in (near, *others):
            transport.close()
