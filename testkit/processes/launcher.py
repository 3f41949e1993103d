"""Start servers by a process that forks them (`testkit.processes.forks`)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

# Of a server whose launcher has ended, and with it what it knew.
UNKNOWN_STATUS = 1
_MOST_DESCRIPTORS = 16


class Process(Protocol):
    """Of a server. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""

    def terminate(self) -> None: ...


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`arguments`: the server's. `environment`: over that of the process that forks, or with `alone` instead of it.
    `log`: for its output. `folder`: for `sys.path`. `numbers`: in the server, of the descriptors that are sent along.
    """

    arguments: list[str]
    environment: dict[str, str]
    alone: bool = False
    log: str = os.devnull
    folder: str = ""
    numbers: list[int] = []


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Asks for the exit status of a server that has ended."""

    pid: int


class Forked:
    """A fork, which has `pid` until its end is seen here. Thread-safe."""

    def __init__(self, starter: Starter, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self._starter, self._lock = starter, threading.Lock()
        self._handle = os.pidfd_open(pid)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._ended(0.0):
                self.returncode = self._starter.reap(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("a server", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000.0 * max(0.0, timeout)))


class Starter:
    """Asks the process at the other end of `channel`. Thread-safe."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()

    def start(self, order: Order, descriptors: Sequence[int] = ()) -> Forked:
        """`descriptors` have `order.numbers` in the server."""
        return Forked(self, self._ask(order, descriptors))

    def reap(self, pid: int) -> int:
        """As `subprocess.Popen.returncode`."""
        try:
            return self._ask(Reap(pid))
        except (OSError, EOFError):
            return UNKNOWN_STATUS

    def close(self) -> None:
        self._channel.close()

    def _ask(self, message: Order | Reap, descriptors: Sequence[int] = ()) -> int:
        data = msgspec.json.encode(message) + b"\n"
        with self._lock:
            sent = socket.send_fds(self._channel, [data], [*descriptors])
            self._channel.sendall(data[sent:])
            answer = read_line(self._channel)[0]
        if not answer:
            raise EOFError("the process that forks servers has ended")
        return int(answer)


class Launcher(Starter):
    """Of a process in which `command` calls `fork_on_order`. It ends with the thread that makes this object, and the
    servers with it. `start` waits until `command` has imported everything.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(command, stdin=there.fileno(), env=environment)
        super().__init__(here)

    def children(self) -> list[int]:
        """Its forks that have not been reaped."""
        pid = self._process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def close(self) -> None:
        """End it, and every server that still runs."""
        super().close()
        self._process.kill()
        self._process.wait()


def read_line(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A line and the descriptors that came with it. Empty at the end."""
    data, descriptors = b"", list[int]()
    while not data.endswith(b"\n"):
        part, found, _, _ = socket.recv_fds(channel, 1 << 16, _MOST_DESCRIPTORS)
        if not part:
            return b"", []
        data, descriptors = data + part, descriptors + found
    return data, descriptors
