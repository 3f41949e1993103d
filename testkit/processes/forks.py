"""Servers as forks of one process that has imported their engine, and shares its memory with them.

An engine starts several processes for a server, each of which would import all of the engine. `fork_on_order` runs in
that one process, which a `Launcher` starts and asks over a socket: the answer to an `Order` is the server's process id,
the leader of its session.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec

from baton.children import die_with_parent
from testkit.processes.launcher import Order, Reap, Starter, read_line

Serve = Callable[[list[str]], Any]


def fork_on_order(prepare: Callable[[], None], serve: Serve) -> None:
    """Until the socket that is standard input ends. `prepare` imports what servers share. `serve` is a server, with its
    arguments; it gets SIGTERM when this process dies.
    """
    die_with_parent(pipe=0)
    channel = socket.socket(fileno=os.dup(0))
    prepare()
    gc.collect()
    # A collection would write to the shared pages.
    gc.freeze()
    _answer(channel, serve)


@contextlib.contextmanager
def fork_here(serve: Serve) -> Iterator[Starter]:
    """Servers as forks of what this process is now; it must not have threads yet. That fork has no open file of this
    process but the standard ones. It ends with the context or with this process.
    """
    here, there = socket.socketpair()
    if (pid := os.fork()) == 0:
        die_with_parent()
        here.close()
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != there.fileno():
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(number)
        _answer(there, serve)
        _end(0)
    there.close()
    try:
        with contextlib.closing(Starter(here)) as starter:
            yield starter
    finally:
        os.waitpid(pid, 0)


def _answer(channel: socket.socket, serve: Serve) -> None:
    while True:
        data, descriptors = read_line(channel)
        if not data:
            return
        message = msgspec.json.decode(data, type=Order | Reap)
        if isinstance(message, Reap):
            number = os.waitstatus_to_exitcode(os.waitpid(message.pid, 0)[1])
        else:
            number = _fork(channel, message, descriptors, serve)
        channel.sendall(b"%d\n" % number)


def _fork(channel: socket.socket, order: Order, descriptors: list[int], serve: Serve) -> int:
    if (pid := os.fork()) == 0:
        _become(channel, order, descriptors, serve)
    for descriptor in descriptors:
        os.close(descriptor)
    while os.getsid(pid) != pid:  # the caller may send a signal to it at once
        os.sched_yield()
    return pid


def _become(channel: socket.socket, order: Order, descriptors: list[int], serve: Serve) -> NoReturn:
    status: Any = 1
    try:
        die_with_parent()  # before `_fork` answers: the caller may end this process's parent at once
        os.setsid()
        channel.close()
        _place(order, descriptors)
        _open_streams()
        if order.alone:
            os.environ.clear()
        os.environ.update(order.environment)
        sys.path[:0] = [order.folder] if order.folder else []
        random.seed()
        serve(order.arguments)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _place(order: Order, descriptors: list[int]) -> None:
    """Give descriptors their numbers, by way of higher ones: one may have the number of another."""
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    places = {0: os.open(os.devnull, os.O_RDONLY), 1: log, 2: log, **dict(zip(order.numbers, descriptors, strict=True))}
    high = {number: fcntl.fcntl(file, fcntl.F_DUPFD, max(places) + 1) for number, file in places.items()}
    for file in {log, *places.values()}:
        os.close(file)
    for number, file in high.items():
        os.dup2(file, number)
        os.close(file)


def _open_streams() -> None:
    """As Python does at its start: the inherited objects know whether other files can be sought in."""
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _end(status: object) -> NoReturn:
    """`status`: of `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
