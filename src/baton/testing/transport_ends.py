"""Checks of the transport suite: cancels, peers that close, die and come back, and misuse."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from baton.errors import ProtocolError, TransportError
from baton.testing.transport_bench import CALLS_S, SIZES, WAIT_S, Bench, copies_of, need, scattered
from baton.testing.transport_peer import FarSide, pattern
from baton.transports.base import Direction, Peer, Transport


def check_cancel_is_quiet(bench: Bench) -> None:
    """A cancelled operation ends soon, and nothing of it is written after that."""
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor).result(30)
        copies = scattered(1024, 64, seed=2)
        operations = [bench.near.submit(peer, "write", copies, f"{i}") for i in range(20)]
        for operation in reversed(operations):
            bench.near.cancel(operation)
        need(all(op.wait(WAIT_S) != "pending" for op in operations), "a cancelled operation ends")
        far.fill(0, 55)
        need(np.array_equal(far.read(0), pattern(SIZES[0], 55)), "nothing is written after the end")
        need(all(op.error for op in operations if op.poll() == "failed"), "a failed operation says why")
        done = bench.run(peer, "write", copies_of([0], [0], [16]))
        bench.near.cancel(done)
        need(done.poll() == "done", "a cancel does not change the state of an ended operation")


def check_survives_a_closed_peer(bench: Bench) -> None:
    """An orderly close in the middle of a copy."""
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor).result(30)
        need(peer.alive() and not peer.fenced(), "an open peer is alive and not fenced")
        operation = bench.near.submit(peer, "write", scattered(1024, 64, seed=3), "into the close")
        far.close()
        need(operation.wait(WAIT_S) != "pending", "an operation ends when the peer closes")
        _is_gone(bench, peer, far)


def check_survives_a_killed_peer(bench: Bench) -> None:
    """A death with nothing under way."""
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor).result(30)
        if far.kill():
            need(bench.soon(peer.fenced), "a dead peer is fenced")
            _is_gone(bench, peer, far)


def check_survives_a_peer_killed_while_copying(bench: Bench) -> None:
    """A death in the middle of copies in both directions."""
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor).result(30)
        copies = scattered(1024, 64, seed=5)
        directions: tuple[Direction, ...] = ("write", "read")
        operations = [bench.near.submit(peer, directions[i % 2], copies, f"{i}") for i in range(20)]
        if far.kill():
            need(all(op.wait(WAIT_S) != "pending" for op in operations), "operations end when the peer dies")
            need(all(op.error for op in operations if op.poll() == "failed"), "a failed operation says why")
            need(bench.soon(peer.fenced), "a dead peer is fenced")
            bench.regions[0][:] = 77
            _is_gone(bench, peer, far)
            need(bool((bench.regions[0] == 77).all()), "nothing is written here once the peer is fenced")


def check_a_failure_stays_with_its_peer(bench: Bench) -> None:
    """One peer's end leaves the copies of another alone."""
    with bench.far() as one, bench.far() as two:
        lost, kept = (bench.near.connect(side.descriptor).result(30) for side in (one, two))
        copies = scattered(1024, 64, seed=6)
        into_the_end = [bench.near.submit(lost, "write", copies, "lost") for _ in range(10)]
        others = [bench.near.submit(kept, "write", copies, "kept") for _ in range(10)]
        if not one.kill():
            one.close()
        need(
            [op.wait(WAIT_S) for op in others] == ["done"] * 10, f"the other peer's copies are done ({others[0].error})"
        )
        need(all(op.wait(WAIT_S) != "pending" for op in into_the_end), "operations end when the peer is gone")
        need(not lost.alive() and kept.alive(), "one peer's end is not the other's")


def _is_gone(bench: Bench, peer: Peer, far: FarSide) -> None:
    try:
        operation = bench.run(peer, "write", copies_of([0], [0], [16]))
    except TransportError:
        pass
    else:
        need(operation.poll() == "failed", "a copy to a peer that is gone fails")
    need(not peer.alive(), "a peer that is gone is not alive")
    bench.near.disconnect(peer)
    bench.near.disconnect(peer)
    _refuses_connection(bench.factory, far.descriptor)


def _refuses_connection(factory: Callable[[], Transport], descriptor: bytes) -> None:
    # From a transport of its own: starting one removes what dead owners left.
    fresh = factory()
    try:
        fresh.connect(descriptor).result(30)
    except (TransportError, ProtocolError):
        return
    finally:
        fresh.close()
    raise AssertionError(f"expected that connecting is refused: {descriptor[:80]!r}")


def check_reconnects(bench: Bench) -> None:
    """Connections to one peer, one after the other, and to the process that comes after it."""
    with bench.far() as far:
        for seed in range(3):
            far.fill(0, seed)
            peer = bench.near.connect(far.descriptor).result(30)
            operation = bench.run(peer, "read", copies_of([0], [0], [SIZES[0]]))
            need(operation.poll() == "done", f"a copy after reconnecting is done ({operation.error})")
            need(np.array_equal(bench.regions[0], pattern(SIZES[0], seed)), "it brings the new bytes")
            bench.near.disconnect(peer)
            _refuses_copies(bench, peer)
        lost = bench.near.connect(far.descriptor).result(30)
        into_the_end = bench.near.submit(lost, "write", scattered(1024, 64, seed=9), "into the end")
        if not far.kill():
            far.close()
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor).result(30)
        need(not lost.alive() and peer.alive(), "a peer's successor is another peer")
        for copies in (copies_of([0], [0], [SIZES[1]], 1, 0), copies_of([0], [8], [64], 1, 1)):
            operation = bench.run(peer, "write", copies)
            need(operation.poll() == "done", f"a copy to a peer's successor is done ({operation.error})")
            # Between the two copies.
            bench.near.disconnect(lost)
        need(into_the_end.wait(WAIT_S) != "pending", "an operation ends when its peer is gone")
        need(np.array_equal(far.read(0)[: SIZES[1]], bench.regions[1]), "the successor has its bytes")


def _refuses_copies(bench: Bench, peer: Peer) -> None:
    try:
        bench.near.submit(peer, "write", copies_of([0], [0], [1]), "late")
    except TransportError:
        return
    raise AssertionError("expected that a copy after disconnect is refused")


def check_waits_for_no_peer(bench: Bench) -> None:
    """A peer that is stopped: calls return at once, others' copies go on, and what was begun ends when it goes on."""
    with bench.far() as far, bench.far() as other:
        known, kept = (bench.near.connect(side.descriptor).result(WAIT_S) for side in (far, other))
        if not far.stop():
            return
        try:
            operation = bench.near.submit(known, "write", scattered(1024, 64, seed=10), "into the stop")
            start = time.monotonic()
            connecting = bench.near.connect(far.descriptor)
            bench.near.cancel(operation)
            bench.near.disconnect(known)
            need(not known.fenced(), "a stopped peer is not fenced")
            need(time.monotonic() - start < CALLS_S, "connect, cancel and disconnect wait for no peer")
            done = bench.run(kept, "write", copies_of([0], [0], [SIZES[0]]))
            need(done.poll() == "done", f"another peer's copies are done meanwhile ({done.error})")
        finally:
            far.go_on()
        need(operation.wait(WAIT_S) != "pending", "a cancelled operation ends when its peer goes on")
        error = connecting.exception(WAIT_S)
        need(error is None or isinstance(error, TransportError), f"connecting ends ({error})")
        again = bench.near.connect(far.descriptor).result(WAIT_S)
        need(bench.run(again, "read", copies_of([0], [0], [64])).poll() == "done", "the peer is reached again")


def check_keeps_two_peers_apart(bench: Bench) -> None:
    """Two peers at once."""
    with bench.far() as one, bench.far() as two:
        peers = [bench.near.connect(side.descriptor).result(30) for side in (one, two)]
        before = two.read(0)
        operations = [
            bench.near.submit(peers[0], "write", copies_of([0], [0], [SIZES[0]]), "one"),
            bench.near.submit(peers[1], "write", copies_of([0], [0], [SIZES[1]], 1, 1), "two"),
        ]
        need([op.wait(WAIT_S) for op in operations] == ["done", "done"], "both copies are done")
        need([op.tag for op in operations] == ["one", "two"], "an operation keeps its tag")
        need(np.array_equal(one.read(0), bench.regions[0]), "the first peer has its bytes")
        need(np.array_equal(two.read(1), bench.regions[1]), "the second peer has its bytes")
        need(np.array_equal(two.read(0), before), "the first peer's bytes go nowhere else")
        one.close()
        need(peers[1].alive(), "one peer's end is not the other's")
        operation = bench.run(peers[1], "write", copies_of([0], [0], [64]))
        need(operation.poll() == "done", f"the other peer still takes copies ({operation.error})")


def check_refuses_misuse(bench: Bench) -> None:
    """Descriptors of nobody, second registrations, use after close."""
    for descriptor in (b"", b"x" * 100, bytes(range(256)), bench.descriptor[:-1]):
        _refuses_connection(bench.factory, descriptor)
    for label, action in (
        ("a second register", lambda: bench.near.register(bench.regions)),
        ("an empty allocation", lambda: bench.near.allocate("none", 0)),
    ):
        try:
            action()
        except TransportError:
            continue
        raise AssertionError(f"expected that {label} is refused")
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor).result(30)
        bench.near.close()
        bench.near.close()
        _refuses_copies(bench, peer)
