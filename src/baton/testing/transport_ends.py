"""Checks of the transport suite: cancels, peers that close, die and come back, and misuse."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from baton.errors import ProtocolError, TransportError
from baton.testing.transport_memory import register
from baton.testing.transport_near import CALLS_S, SIZES, WAIT_S, NearSide, copies_of, require, scattered_runs
from baton.testing.transport_peer import FarSide, pattern
from baton.transports.base import Direction, Peer, Transport


def check_cancel_is_quiet(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        copies = scattered_runs(1024, 64, seed=2)
        operations = [here.transport.submit(peer, "write", copies, f"{i}") for i in range(20)]
        for operation in reversed(operations):
            here.transport.cancel(operation)
        require(all(op.wait(WAIT_S) != "pending" for op in operations), "a cancelled operation ends")
        far.fill(0, 55)
        require(np.array_equal(far.read(0), pattern(SIZES[0], 55)), "nothing is written after the end")
        require(all(op.error for op in operations if op.poll() == "failed"), "a failed operation says why")
        done = here.run(peer, "write", copies_of([0], [0], [16]))
        here.transport.cancel(done)
        require(done.poll() == "done", "a cancel does not change the state of an ended operation")


def check_survives_a_closed_peer(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        require(peer.alive() and not peer.fenced(), "an open peer is alive and not fenced")
        operation = here.transport.submit(peer, "write", scattered_runs(1024, 64, seed=3), "into the close")
        far.close()
        require(operation.wait(WAIT_S) != "pending", "an operation ends when the peer closes")
        _is_gone(here, peer, far)


def check_survives_a_killed_peer(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        if far.kill():
            require(here.becomes_true(peer.fenced), "a dead peer is fenced")
            _is_gone(here, peer, far)


def check_survives_a_peer_killed_while_copying(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        copies = scattered_runs(1024, 64, seed=5)
        directions: tuple[Direction, ...] = ("write", "read")
        operations = [here.transport.submit(peer, directions[i % 2], copies, f"{i}") for i in range(20)]
        if far.kill():
            require(all(op.wait(WAIT_S) != "pending" for op in operations), "operations end when the peer dies")
            require(all(op.error for op in operations if op.poll() == "failed"), "a failed operation says why")
            require(here.becomes_true(peer.fenced), "a dead peer is fenced")
            here.regions[0][:] = 77
            _is_gone(here, peer, far)
            require(bool((here.regions[0] == 77).all()), "nothing is written here once the peer is fenced")


def check_a_failure_stays_with_its_peer(here: NearSide) -> None:
    with here.far() as one, here.far() as two:
        lost, kept = (here.transport.connect(side.descriptor).result(WAIT_S) for side in (one, two))
        copies = scattered_runs(1024, 64, seed=6)
        into_the_end = [here.transport.submit(lost, "write", copies, "lost") for _ in range(10)]
        others = [here.transport.submit(kept, "write", copies, "kept") for _ in range(10)]
        if not one.kill():
            one.close()
        require(
            [op.wait(WAIT_S) for op in others] == ["done"] * 10, f"the other peer's copies are done ({others[0].error})"
        )
        require(all(op.wait(WAIT_S) != "pending" for op in into_the_end), "operations end when the peer is gone")
        require(not lost.alive() and kept.alive(), "one peer's end is not the other's")


def _is_gone(here: NearSide, peer: Peer, far: FarSide) -> None:
    try:
        operation = here.run(peer, "write", copies_of([0], [0], [16]))
    except TransportError:
        pass
    else:
        require(operation.poll() == "failed", "a copy to a peer that is gone fails")
    require(not peer.alive(), "a peer that is gone is not alive")
    here.transport.disconnect(peer)
    here.transport.disconnect(peer)
    _refuses_connection(here.factory, far.descriptor)


def _refuses_connection(factory: Callable[[], Transport], descriptor: bytes) -> None:
    # A new transport removes the segments of dead owners.
    fresh = factory()
    try:
        fresh.connect(descriptor).result(WAIT_S)
    except (TransportError, ProtocolError):
        return
    finally:
        fresh.close()
    raise AssertionError(f"expected that connecting is refused: {descriptor[:80]!r}")


def check_reconnects(here: NearSide) -> None:
    """Successive connections to one peer, and to the process that replaces it."""
    with here.far() as far:
        for seed in range(3):
            far.fill(0, seed)
            peer = here.transport.connect(far.descriptor).result(WAIT_S)
            operation = here.run(peer, "read", copies_of([0], [0], [SIZES[0]]))
            require(operation.poll() == "done", f"a copy after reconnecting is done ({operation.error})")
            require(np.array_equal(here.regions[0], pattern(SIZES[0], seed)), "it brings the new bytes")
            here.transport.disconnect(peer)
            _refuses_copies(here, peer)
        lost = here.transport.connect(far.descriptor).result(WAIT_S)
        into_the_end = here.transport.submit(lost, "write", scattered_runs(1024, 64, seed=9), "into the end")
        if not far.kill():
            far.close()
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        require(not lost.alive() and peer.alive(), "a peer's successor is another peer")
        for copies in (copies_of([0], [0], [SIZES[1]], 1, 0), copies_of([0], [8], [64], 1, 1)):
            operation = here.run(peer, "write", copies)
            require(operation.poll() == "done", f"a copy to a peer's successor is done ({operation.error})")
            # Between the two copies.
            here.transport.disconnect(lost)
        require(into_the_end.wait(WAIT_S) != "pending", "an operation ends when its peer is gone")
        require(np.array_equal(far.read(0)[: SIZES[1]], here.regions[1]), "the successor has its bytes")


def _refuses_copies(here: NearSide, peer: Peer) -> None:
    try:
        here.transport.submit(peer, "write", copies_of([0], [0], [1]), "late")
    except TransportError:
        return
    raise AssertionError("expected that a copy after disconnect is refused")


def check_waits_for_no_peer(here: NearSide) -> None:
    """With a stopped peer: calls return at once, other peers' copies continue, and pending work ends when it runs
    again."""
    with here.far() as far, here.far() as other:
        known, kept = (here.transport.connect(side.descriptor).result(WAIT_S) for side in (far, other))
        if not far.stop():
            return
        try:
            operation = here.transport.submit(known, "write", scattered_runs(1024, 64, seed=10), "into the stop")
            start = time.monotonic()
            connecting = here.transport.connect(far.descriptor)
            here.transport.cancel(operation)
            here.transport.disconnect(known)
            require(not known.fenced(), "a stopped peer is not fenced")
            require(time.monotonic() - start < CALLS_S, "connect, cancel and disconnect wait for no peer")
            done = here.run(kept, "write", copies_of([0], [0], [SIZES[0]]))
            require(done.poll() == "done", f"another peer's copies are done meanwhile ({done.error})")
        finally:
            far.go_on()
        require(operation.wait(WAIT_S) != "pending", "a cancelled operation ends when its peer goes on")
        error = connecting.exception(WAIT_S)
        require(error is None or isinstance(error, TransportError), f"connecting ends ({error})")
        again = here.transport.connect(far.descriptor).result(WAIT_S)
        require(here.run(again, "read", copies_of([0], [0], [64])).poll() == "done", "the peer is reached again")


def check_keeps_two_peers_apart(here: NearSide) -> None:
    with here.far() as one, here.far() as two:
        peers = [here.transport.connect(side.descriptor).result(WAIT_S) for side in (one, two)]
        before = two.read(0)
        operations = [
            here.transport.submit(peers[0], "write", copies_of([0], [0], [SIZES[0]]), "one"),
            here.transport.submit(peers[1], "write", copies_of([0], [0], [SIZES[1]], 1, 1), "two"),
        ]
        require([op.wait(WAIT_S) for op in operations] == ["done", "done"], "both copies are done")
        require([op.tag for op in operations] == ["one", "two"], "an operation keeps its tag")
        require(np.array_equal(one.read(0), here.regions[0]), "the first peer has its bytes")
        require(np.array_equal(two.read(1), here.regions[1]), "the second peer has its bytes")
        require(np.array_equal(two.read(0), before), "the first peer's bytes go nowhere else")
        one.close()
        require(peers[1].alive(), "one peer's end is not the other's")
        operation = here.run(peers[1], "write", copies_of([0], [0], [64]))
        require(operation.poll() == "done", f"the other peer still takes copies ({operation.error})")


def check_refuses_misuse(here: NearSide) -> None:
    """Malformed descriptors, second registrations, use after close."""
    for descriptor in (b"", b"x" * 100, bytes(range(256)), here.descriptor[:-1]):
        _refuses_connection(here.factory, descriptor)
    for label, action in (
        ("a second register", lambda: register(here.transport, here.regions)),
        ("an empty allocation", lambda: here.transport.allocate("none", 0)),
    ):
        try:
            action()
        except TransportError:
            continue
        raise AssertionError(f"expected that {label} is refused")
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        here.transport.close()
        here.transport.close()
        _refuses_copies(here, peer)
