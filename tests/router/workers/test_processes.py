"""Forked processes: all serve, are ended together, and are replaced if they end by themselves."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.errors import BatonError
from baton.openai.http.serving import bind
from baton.router.workers import worker_processes
from baton.router.workers.worker_processes import WorkerProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts on SIGTERM of a forked process")


def serve_until_sigterm(number: int, ready: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ready()
    signal.sigwait({signal.SIGTERM})


def test_all_serve_and_end_with_sigterm() -> None:
    ended: list[int] = []
    workers = WorkerProcesses(3, serve_until_sigterm, ended.append)
    workers.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sorted(ended) == [0, 1, 2]


class LateHandler(logging.Handler):
    """Writes what it was given when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._lines = path, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def close(self) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in self._lines)
        self._lines.clear()
        super().close()


def test_what_a_process_logs_last_is_written(tmp_path: Path) -> None:
    def serve(number: int, ready: Callable[[], None]) -> None:
        raise BatonError("the last line")

    handler = LateHandler(tmp_path / "log")
    root = logging.getLogger("baton")
    root.addHandler(handler)
    try:
        with pytest.raises(BatonError, match="ended with 1 before it was ready"):
            WorkerProcesses(1, serve).run(lambda: None)
        assert (tmp_path / "log").read_text() == "the last line\n"
    finally:
        root.removeHandler(handler)


def test_the_end_of_a_child_that_is_no_process_of_the_router_is_no_matter() -> None:
    """The first process of a container becomes the parent of all that lose theirs."""
    if (pid := os.fork()) == 0:
        os._exit(1)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended: list[int] = []
    WorkerProcesses(2, serve_until_sigterm, ended.append).run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGSTOP], ids=["ends", "killed", "stopped"])
@pytest.mark.parametrize("num", [1, 2])
def test_one_that_served_is_replaced_however_young(
    tmp_path: Path, number: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, said = tmp_path / "began", tmp_path / "said"
    said.touch()

    def serve(which: int, alive: Callable[[], None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if which == 0 and began.exists():
            os.kill(os.getppid(), signal.SIGTERM)
        elif which == 0:
            began.touch()
            alive()
            if not number:
                return
            os.kill(os.getpid(), number)
        while signal.sigtimedwait({signal.SIGTERM}, 0.05) is None:
            alive()
            with said.open("ab") as file:
                file.write(b".")

    def monotonic() -> float:
        """Time passes as the healthy process speaks, so that it is never silent on a busy machine."""
        return said.stat().st_size / 10 if num > 1 else time.monotonic()

    monkeypatch.setattr(worker_processes, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    ended: list[int] = []
    WorkerProcesses(num, serve, ended.append, silent_s=2.0 if number == signal.SIGSTOP else 60.0).run(lambda: None)
    assert sorted(ended) == [0, *range(num)]


def test_a_signal_that_another_thread_takes_reaches_a_process_not_yet_recorded() -> None:
    done, armed = threading.Event(), [True]

    def end() -> None:
        if armed:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    thread = threading.Thread(target=done.wait)
    thread.start()
    os.register_at_fork(after_in_parent=end)
    ended: list[int] = []
    try:
        WorkerProcesses(2, serve_until_sigterm, ended.append).run(lambda: None)
    finally:
        armed.clear()
        done.set()
        thread.join()
    assert ended == [0]


def test_no_connection_waits_for_processes_that_end(tmp_path: Path) -> None:
    """While they drain, the port is closed: a client tries another router."""
    listeners = [bind("127.0.0.1", 0, shared=True)]
    listeners.append(bind("127.0.0.1", listeners[0].getsockname()[1], shared=True))
    address = listeners[0].getsockname()

    def close_all() -> None:
        for listener in listeners:
            listener.close()

    def serve(number: int, alive: Callable[[], None]) -> None:
        serve_until_sigterm(number, alive)
        close_all()
        for _ in range(500):
            try:
                socket.create_connection(address, 1.0).close()
            except ConnectionRefusedError:
                (tmp_path / str(number)).touch()
                return
            time.sleep(0.01)

    WorkerProcesses(2, serve, on_stop=close_all).run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_one_that_ends_at_once_ends_all() -> None:
    def serve(number: int, ready: Callable[[], None]) -> None:
        if number:
            raise BatonError("it cannot serve")
        serve_until_sigterm(number, ready)

    with pytest.raises(BatonError, match="router process 1 ended with 1 before it was ready"):
        WorkerProcesses(2, serve).run(lambda: None)
