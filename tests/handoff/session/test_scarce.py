"""Handoffs in a process that runs out of descriptors, temporarily or for good."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest

from baton.clock import SystemClock
from baton.errors import TransportError
from baton.handoff.protocol.events import DecodeCommitted, DecodeFailed, DecodeReleased, PrefillReleased
from baton.handoff.session.connecting import TransportEnds
from baton.kv.interval import Interval
from baton.transports.base import Peer
from baton.transports.mapped.segments import remove_stale_segments
from baton.transports.process import ProcessWatch, own_host_key, process_start_ticks
from baton.transports.remote.lifeline import Lifeline
from testkit.handoffs.nodes import SEEDS, TIMERS, Node, Pair, ticket_for
from testkit.inside import rank_handoffs_of
from testkit.waiting import eventually

N = 8


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened: the lowest free descriptor is over the limit, and so are those that earlier tests' sockets
    may still free. The limit is not 0, because poll() refuses more descriptors at once than it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(free, 16), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def begin(p: Node, d: Node) -> None:
    """Both legs of one handoff; P's pages are written."""
    ticket = ticket_for(p, d, "push")
    source = p.pages(1, N)
    p.fill(source, N, 0.5)
    d.agent.open_decode(ticket, N, {"target": Interval(0, N), "draft": Interval(0, N)}, d.pages(3, N))
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, N, source, {"target": N, "draft": N - 1})
    p.agent.finish_prefill(ticket.key, SEEDS, False, {"target": N, "draft": N})


@pytest.mark.parametrize("scheme", ["local://", "shm://"])
def test_a_leg_outlives_a_while_without_descriptors(pair: Pair, scheme: str) -> None:
    p, d = pair.both(scheme)
    with no_descriptors():
        begin(p, d)
        eventually(lambda: d.agent._channel.dropped >= 2)
    committed = d.next(DecodeCommitted)
    assert isinstance(committed, DecodeCommitted)
    assert committed.seeds == SEEDS
    assert p.next(PrefillReleased) == PrefillReleased(committed.key, "committed")
    for group, table in d.pages(3, N).items():
        assert (d.tokens(group, table, 0, N) == p.tokens(group, p.pages(1, N)[group], 0, N)).all()


def test_a_leg_ends_where_no_descriptor_comes_back(pair: Pair) -> None:
    # D tries to connect until its lease ends.
    p, d = pair.node("P"), pair.node("D", timers=replace(TIMERS, renew=0.5, lease=1.5))
    with no_descriptors():
        begin(p, d)
        failed = d.next(DecodeFailed)
        assert isinstance(failed, DecodeFailed)
        assert failed.reason == "unreachable_peer"
        d.next(DecodeReleased)


def test_a_transport_that_fails_with_an_error_of_the_system_ends_the_leg(pair: Pair) -> None:
    p, d = pair.both()

    def connect(descriptor: bytes) -> Future[Peer]:
        raise OSError(errno.EMFILE, "Too many open files")

    d.transport.connect = connect  # type: ignore[method-assign]
    begin(p, d)
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "unreachable_peer"
    d.next(DecodeReleased)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("a fault")])
def test_whatever_a_connection_ends_with_is_an_error_of_the_transport(pair: Pair, error: Exception) -> None:
    node = pair.node("P")
    ends = TransportEnds(node.transport, SystemClock(), lambda: None)
    future: Future[Peer] = Future()
    future.set_exception(error)
    with pytest.raises(TransportError, match=str(error.args[-1])):
        ends.result(future, b"descriptor")


def test_an_error_of_the_clock_part_does_not_keep_messages_waiting(pair: Pair) -> None:
    p, d = pair.both()

    def broken(now: float) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for node in (p, d):
        rank_handoffs_of(node.agent).sessions.renew = broken  # type: ignore[method-assign]
    begin(p, d)
    d.next(DecodeCommitted)


def test_a_process_that_cannot_be_looked_at_is_not_dead() -> None:
    """Treating it as dead would free pages that it may still write, and unlink memory that it uses."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started, host_key = process_start_ticks(child.pid), own_host_key()
        with no_descriptors(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("baton.transports.process.own_host_key", lambda: host_key)
            watch = ProcessWatch(child.pid, started, host_key)
            assert not watch.dead()
            with pytest.raises(OSError, match="Too many open files"):
                process_start_ticks(child.pid)
        assert not watch.dead()
        child.kill()
    assert watch.dead()
    assert process_start_ticks(child.pid) == ""


def test_segments_of_a_process_that_cannot_be_looked_at_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    name = f"baton-{os.getpid()}-{process_start_ticks(os.getpid())}-0123456789abcdef"
    path = os.path.join(str(tmp_path), name)
    with open(path, "wb"):
        pass

    def scarce(pid: int) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("baton.transports.mapped.segments.stat_of", scarce)
    assert remove_stale_segments(str(tmp_path)) == []
    assert os.path.exists(path)


def test_a_lifeline_without_descriptors_does_not_look_again_at_once() -> None:
    line = Lifeline("127.0.0.1")
    try:
        with socket.socket() as caller:
            with no_descriptors():
                caller.connect((line.contact.host, line.contact.port))
                deadline = time.monotonic() + 60
                while line._accept_at is None:
                    assert time.monotonic() < deadline
                    line.wait(0.05)
                assert line._listener not in {key.fileobj for key in line._selector.get_map().values()}
            while not line._strangers:
                assert time.monotonic() < deadline
                line.wait(0.05)
    finally:
        line.close()
