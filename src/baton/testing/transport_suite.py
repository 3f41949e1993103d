"""The conformance suite that every transport passes, those of other packages included.

    from baton.testing import check_transport
    check_transport(lambda: create_transport("shm://"), spawn_uri="shm://")

Each check makes its own transports and closes them. With `spawn_uri` the far side lives in a process of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from baton.errors import BatonError, ProtocolError, TransportError
from baton.testing.transport_peer import FarSide, NearbyPeer, SpawnedPeer, pattern
from baton.transports.base import ByteArray, CopyList, Direction, Operation, Peer, Transport

WAIT_S = 60.0
SIZES = (1 << 16, 1 << 14)


@dataclass(slots=True)
class _Bench:
    """A near transport with its regions, and how to make far sides."""

    factory: Callable[[], Transport]
    spawn_uri: str | None
    near: Transport
    regions: list[ByteArray]
    descriptor: bytes

    @contextmanager
    def far(self, sizes: Sequence[int] = SIZES) -> Iterator[FarSide]:
        """A far side, its regions filled with seeds 100, 101, ..."""
        side: FarSide
        side = NearbyPeer(self.factory(), sizes) if self.spawn_uri is None else SpawnedPeer(self.spawn_uri, sizes)
        try:
            for i in range(len(sizes)):
                side.fill(i, 100 + i)
            yield side
        finally:
            side.close()

    def run(self, peer: Peer, direction: Direction, copies: CopyList) -> Operation:
        """Submit, and wait for the end."""
        operation = self.near.submit(peer, direction, copies, "check")
        _need(operation.wait(WAIT_S) != "pending", "an operation ends")
        return operation


def check_transport(factory: Callable[[], Transport], *, spawn_uri: str | None = None) -> list[str]:
    """Run the whole suite on transports made by `factory` and return the names of the checks that ran.

    Raises `AssertionError` naming the check, with the first broken expectation.
    """
    names = []
    for check in _CHECKS:
        name = check.__name__.removeprefix("_check_")
        near = factory()
        try:
            regions = [near.allocate(f"near {i}", size) for i, size in enumerate(SIZES)]
            _need(all(not region.any() for region in regions), f"{name}: allocated memory is zeroed")
            for i, region in enumerate(regions):
                region[:] = pattern(region.size, i)
            check(_Bench(factory, spawn_uri, near, regions, near.register(regions)))
        except (AssertionError, BatonError) as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            near.close()
        names.append(name)
    return names


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"expected that {what}")


def _copies(
    source: ArrayLike, dest: ArrayLike, nbytes: ArrayLike, source_region: int = 0, dest_region: int = 0
) -> CopyList:
    columns = [np.array(column, dtype=np.int64).reshape(-1) for column in (source, dest, nbytes)]
    return CopyList(source_region, dest_region, *columns)


def _applied(before: ByteArray, source: ByteArray, copies: CopyList) -> ByteArray:
    after = before.copy()
    for s, d, n in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
        after[d : d + n] = source[s : s + n]
    return after


def _scattered(runs: int, slot: int, seed: int) -> CopyList:
    """Runs of ragged length, in shuffled slots on both sides."""
    rng = np.random.default_rng(seed)
    places = [rng.permutation(runs) * slot for _ in range(2)]
    return _copies(places[0], places[1], rng.integers(1, slot + 1, runs))


def _check_copies_exactly(bench: _Bench) -> None:
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor)
        _need(list(peer.region_sizes) == list(SIZES), "the peer's region sizes are known")
        cases = [
            _copies([0, 4096, 77], [1000, 0, 60000], [100, 512, 1]),
            _copies([3], [5], [SIZES[1] - 8], 1, 1),
            _copies([0], [0], [SIZES[1]], 0, 1),
            _scattered(1024, 64, seed=1),
            _copies([], [], []),
        ]
        for copies in cases:
            before = far.read(copies.dest_region)
            operation = bench.run(peer, "write", copies)
            _need(operation.poll() == "done" and operation.error is None, f"a write is done ({operation.error})")
            after = _applied(before, bench.regions[copies.source_region], copies)
            _need(np.array_equal(far.read(copies.dest_region), after), "a write changes just its bytes")
            source, before = far.read(copies.source_region), bench.regions[copies.dest_region].copy()
            operation = bench.run(peer, "read", copies)
            _need(operation.poll() == "done", f"a read is done ({operation.error})")
            after = _applied(before, source, copies)
            _need(np.array_equal(bench.regions[copies.dest_region], after), "a read changes just its bytes")


def _check_moves_large_regions(bench: _Bench) -> None:
    size = 1 << 23
    near = bench.factory()
    try:
        region = near.allocate("large", size)
        region[:] = pattern(size, 7)
        near.register([region])
        with bench.far([size]) as far:
            operation = near.submit(near.connect(far.descriptor), "write", _copies([0], [0], [size]), "large")
            _need(operation.wait(WAIT_S) == "done", f"8 MiB in one run are copied ({operation.error})")
            _need(np.array_equal(far.read(0), region), "8 MiB arrive unchanged")
    finally:
        near.close()


def _check_done_means_visible(bench: _Bench) -> None:
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor)
        for round_ in range(50):
            bench.regions[1][:] = round_
            operation = bench.run(peer, "write", _copies([0], [0], [SIZES[1]], 1, 1))
            _need(operation.poll() == "done", f"a write is done ({operation.error})")
            _need(bool((far.read(1) == round_).all()), "the owner sees all bytes once the operation is done")


def _check_refuses_out_of_bounds(bench: _Bench) -> None:
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor)
        before = far.read(0)
        huge = 2**63 - 1
        bad = [
            _copies([0], [SIZES[0] - 4], [8]),
            _copies([SIZES[0]], [0], [1]),
            _copies([-1], [0], [8]),
            _copies([0], [-8], [16]),
            _copies([0], [0], [-1]),
            _copies([0, 0], [0, huge - 3], [4, 8]),
            _copies([huge], [0], [huge]),
            _copies([0], [0], [1], 2, 0),
            _copies([0], [0], [1], 0, -1),
        ]
        for copies in bad:
            for direction in ("write", "read"):
                try:
                    bench.near.submit(peer, direction, copies, "bad")
                except ProtocolError:
                    continue
                raise AssertionError(f"expected that a {direction} outside a region is refused: {copies}")
        _need(np.array_equal(far.read(0), before), "a refused copy moves no byte")


def _check_cancel_is_quiet(bench: _Bench) -> None:
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor)
        copies = _scattered(1024, 64, seed=2)
        operations = [bench.near.submit(peer, "write", copies, f"{i}") for i in range(20)]
        verdicts = [bench.near.cancel(operation) for operation in reversed(operations)]
        _need(set(verdicts) <= {"quiet", "unknown"}, "cancel answers quiet or unknown")
        if "unknown" not in verdicts:
            _need(all(op.poll() != "pending" for op in operations), "a quiet operation has ended")
            far.fill(0, 55)
            _need(np.array_equal(far.read(0), pattern(SIZES[0], 55)), "nothing is written after quiet")
        _need(all(op.error for op in operations if op.poll() == "failed"), "a failed operation says why")
        done = bench.run(peer, "write", _copies([0], [0], [16]))
        _need(bench.near.cancel(done) == "quiet", "an ended operation is quiet")
        _need(done.poll() == "done", "a cancel does not change the state of an ended operation")


def _check_survives_a_closed_peer(bench: _Bench) -> None:
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor)
        _need(peer.alive() and not peer.fenced(), "an open peer is alive and not fenced")
        operation = bench.near.submit(peer, "write", _scattered(1024, 64, seed=3), "into the close")
        far.close()
        _need(operation.wait(WAIT_S) != "pending", "an operation ends when the peer closes")
        _is_gone(bench, peer, far)


def _check_survives_a_killed_peer(bench: _Bench) -> None:
    with bench.far() as far:
        peer = bench.near.connect(far.descriptor)
        if far.kill():
            _need(peer.fenced(), "a dead peer is fenced")
            _is_gone(bench, peer, far)


def _is_gone(bench: _Bench, peer: Peer, far: FarSide) -> None:
    try:
        operation = bench.run(peer, "write", _copies([0], [0], [16]))
    except TransportError:
        pass
    else:
        _need(operation.poll() == "failed", "a copy to a peer that is gone fails")
    _need(not peer.alive(), "a peer that is gone is not alive")
    bench.near.disconnect(peer)
    bench.near.disconnect(peer)
    _refuses_connection(bench.factory, far.descriptor)


def _refuses_connection(factory: Callable[[], Transport], descriptor: bytes) -> None:
    # From a transport of its own: starting one removes what dead owners left.
    fresh = factory()
    try:
        fresh.connect(descriptor)
    except (TransportError, ProtocolError):
        return
    finally:
        fresh.close()
    raise AssertionError(f"expected that connecting is refused: {descriptor[:80]!r}")


def _check_reconnects(bench: _Bench) -> None:
    with bench.far() as far:
        for seed in range(3):
            far.fill(0, seed)
            peer = bench.near.connect(far.descriptor)
            operation = bench.run(peer, "read", _copies([0], [0], [SIZES[0]]))
            _need(operation.poll() == "done", f"a copy after reconnecting is done ({operation.error})")
            _need(np.array_equal(bench.regions[0], pattern(SIZES[0], seed)), "it brings the new bytes")
            bench.near.disconnect(peer)
            _refuses_copies(bench, peer)


def _refuses_copies(bench: _Bench, peer: Peer) -> None:
    try:
        bench.near.submit(peer, "write", _copies([0], [0], [1]), "late")
    except TransportError:
        return
    raise AssertionError("expected that a copy after disconnect is refused")


def _check_keeps_two_peers_apart(bench: _Bench) -> None:
    with bench.far() as one, bench.far() as two:
        peers = [bench.near.connect(side.descriptor) for side in (one, two)]
        before = two.read(0)
        operations = [
            bench.near.submit(peers[0], "write", _copies([0], [0], [SIZES[0]]), "one"),
            bench.near.submit(peers[1], "write", _copies([0], [0], [SIZES[1]], 1, 1), "two"),
        ]
        _need([op.wait(WAIT_S) for op in operations] == ["done", "done"], "both copies are done")
        _need([op.tag for op in operations] == ["one", "two"], "an operation keeps its tag")
        _need(np.array_equal(one.read(0), bench.regions[0]), "the first peer has its bytes")
        _need(np.array_equal(two.read(1), bench.regions[1]), "the second peer has its bytes")
        _need(np.array_equal(two.read(0), before), "the first peer's bytes go nowhere else")
        one.close()
        _need(peers[1].alive(), "one peer's end is not the other's")
        operation = bench.run(peers[1], "write", _copies([0], [0], [64]))
        _need(operation.poll() == "done", f"the other peer still takes copies ({operation.error})")


def _check_refuses_misuse(bench: _Bench) -> None:
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
        peer = bench.near.connect(far.descriptor)
        bench.near.close()
        bench.near.close()
        _refuses_copies(bench, peer)


_CHECKS: tuple[Callable[[_Bench], None], ...] = (
    _check_copies_exactly,
    _check_moves_large_regions,
    _check_done_means_visible,
    _check_refuses_out_of_bounds,
    _check_cancel_is_quiet,
    _check_survives_a_closed_peer,
    _check_survives_a_killed_peer,
    _check_reconnects,
    _check_keeps_two_peers_apart,
    _check_refuses_misuse,
)
