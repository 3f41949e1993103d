"""Servers as forks of one process that has imported their engine, and shares its memory with them.

An engine starts several processes for a server, each of which would import all of the engine. `fork_on_order` runs in
that one process, which a `Launcher` starts and asks: a line of its standard input is an `Order`, the answer is the
server's process id, the leader of its session.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any, NoReturn, Protocol

import msgspec

from baton.parent import die_with_parent


class Process(Protocol):
    """Of a server. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""

    def terminate(self) -> None: ...


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments`: the server's. `environment`: over that of the process that forks. `folder`: for `sys.path`."""

    arguments: list[str]
    environment: dict[str, str]
    log: str
    folder: str = ""


class Forked:
    """A fork. Its parent does not reap it, so `pid` stays its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)

    def poll(self) -> int | None:
        return 1 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a server", timeout or 0.0)
        return 1

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGTERM)


class Launcher:
    """A process in which `command` calls `fork_on_order`. It ends with the thread that makes this object, and the
    servers with it. `start` may be called by any thread, and waits until `command` has imported everything.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, preexec_fn=die_with_parent
        )
        self._lock, self._ready = threading.Lock(), False

    def start(self, order: Order) -> Forked:
        with self._lock:
            if not self._ready:
                self._ready = bool(self._answer())
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
            return Forked(int(self._answer()))

    def close(self) -> None:
        """End it, and every server that still runs."""
        self._process.kill()
        # Not until the end of its output: servers that are still ending have it open too.
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        assert found, "the process that starts servers has ended"
        return found


def fork_on_order(prepare: Callable[[], None], serve: Callable[[list[str]], Any]) -> None:
    """Until standard input ends. `prepare` imports what servers share. `serve` is a server, with its arguments; it
    gets SIGTERM when this process dies.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What is imported may print; answers are the only lines.
    os.dup2(2, 1)
    prepare()
    gc.collect()
    # A collection would write to the shared pages.
    gc.freeze()
    print("ready", file=answers)
    for line in sys.stdin:
        print(_fork(msgspec.json.decode(line, type=Order), serve), file=answers)


def _fork(order: Order, serve: Callable[[list[str]], Any]) -> int:
    if (pid := os.fork()) == 0:
        _become(order, serve)
    while os.getsid(pid) != pid:  # the caller may send a signal to it at once
        os.sched_yield()
    return pid


def _become(order: Order, serve: Callable[[list[str]], Any]) -> NoReturn:
    try:
        die_with_parent()  # before `_fork` answers: the caller may end this process's parent at once
        os.setsid()
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(file, number)
        os.environ.update(order.environment)
        sys.path[:0] = [order.folder] if order.folder else []
        random.seed()
        # Removes the shared memory that the server and its children leave. vLLM kills one that a child starts.
        resource_tracker.ensure_running()
        serve(order.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
