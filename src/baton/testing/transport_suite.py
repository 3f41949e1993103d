"""The conformance suite for transports, also of other packages.

    from baton.testing import check_transport
    check_transport(lambda: create_transport("shm://"), spawn_uri="shm://")

Each check makes its own transports and closes them. With `spawn_uri` the far side has its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from baton.errors import BatonError, ProtocolError
from baton.kv.geometry import CopyList
from baton.testing import transport_ends as ends
from baton.testing.transport_memory import allocate, register
from baton.testing.transport_near import SIZES, WAIT_S, NearSide, copied_bytes, copies_of, require, scattered_runs
from baton.testing.transport_peer import pattern
from baton.transports.base import Transport


def check_names() -> list[str]:
    return [check.__name__.removeprefix("_").removeprefix("check_") for check in _CHECKS]


def check_transport(
    factory: Callable[[], Transport],
    *,
    spawn_uri: str | None = None,
    only: Collection[str] | None = None,
    device: str | None = None,
) -> list[str]:
    """Run the suite, or the checks named in `only`, on transports made by `factory`. Returns the names of these
    checks. Regions are in memory of `device` ("cuda:0"), or allocated by the transport.

    Raises `AssertionError` naming the check and its first failure.
    """
    names = []
    for name, check in zip(check_names(), _CHECKS, strict=True):
        if only is not None and name not in only:
            continue
        near = factory()
        try:
            regions = [allocate(near, f"near {i}", size, device) for i, size in enumerate(SIZES)]
            require(all(not region.any() for region in regions), f"{name}: allocated memory is zeroed")
            for i, region in enumerate(regions):
                region[:] = pattern(region.size, i)
            check(NearSide(factory, spawn_uri, near, regions, register(near, regions), device))
        except (AssertionError, BatonError) as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            near.close()
        names.append(name)
    return names


def _check_copies_exactly(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        require(list(peer.region_sizes) == list(SIZES), "the peer's region sizes are known")
        cases = [
            copies_of([0, 4096, 77], [1000, 0, 60000], [100, 512, 1]),
            copies_of([3], [5], [SIZES[1] - 8], 1, 1),
            copies_of([0], [0], [SIZES[1]], 0, 1),
            scattered_runs(1024, 64, seed=1),
            copies_of([], [], []),
        ]
        for copies in cases:
            before = far.read(copies.dest_region)
            operation = here.run(peer, "write", copies)
            require(operation.poll() == "done" and operation.error is None, f"a write is done ({operation.error})")
            after = copied_bytes(before, here.regions[copies.source_region].copy(), copies)
            require(np.array_equal(far.read(copies.dest_region), after), "a write changes just its bytes")
            source, before = far.read(copies.source_region), here.regions[copies.dest_region].copy()
            operation = here.run(peer, "read", copies)
            require(operation.poll() == "done", f"a read is done ({operation.error})")
            after = copied_bytes(before, source, copies)
            require(np.array_equal(here.regions[copies.dest_region], after), "a read changes just its bytes")


def _check_moves_large_regions(here: NearSide) -> None:
    size = 1 << 23
    near = here.factory()
    try:
        region = allocate(near, "large", size, here.device)
        region[:] = pattern(size, 7)
        register(near, [region])
        with here.far([size]) as far:
            operation = near.submit(
                near.connect(far.descriptor).result(WAIT_S), "write", copies_of([0], [0], [size]), "large"
            )
            require(operation.wait(WAIT_S) == "done", f"8 MiB in one run are copied ({operation.error})")
            require(np.array_equal(far.read(0), region), "8 MiB arrive unchanged")
    finally:
        near.close()


def _check_copies_many_runs(here: NearSide) -> None:
    slot, runs = 48, 20_000
    near = here.factory()
    try:
        region = allocate(near, "many", slot * runs, here.device)
        region[:] = pattern(region.size, 8)
        register(near, [region])
        with here.far([region.size]) as far:
            peer = near.connect(far.descriptor).result(WAIT_S)
            copies = scattered_runs(runs, slot, seed=4)
            after = copied_bytes(far.read(0), region.copy(), copies)
            operation = near.submit(peer, "write", copies, "many")
            require(operation.wait(WAIT_S) == "done", f"20,000 runs are written ({operation.error})")
            require(np.array_equal(far.read(0), after), "20,000 runs arrive, and change nothing else")
            back = copies_of(copies.dest_offset, copies.source_offset, copies.nbytes)
            want = region.copy()
            region[:] = 0
            operation = near.submit(peer, "read", back, "many")
            require(operation.wait(WAIT_S) == "done", f"20,000 runs are read ({operation.error})")
            require(
                np.array_equal(region, copied_bytes(np.zeros_like(want), want, _to_itself(copies))), "they come back"
            )
    finally:
        near.close()


def _to_itself(copies: CopyList) -> CopyList:
    return copies_of(copies.source_offset, copies.source_offset, copies.nbytes)


def _check_keeps_order(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        for round_ in range(20):
            here.regions[1][:] = round_
            first = here.transport.submit(peer, "write", scattered_runs(256, 64, seed=round_), "first")
            require(first.wait(WAIT_S) == "done", f"a write is done ({first.error})")
            second = here.run(peer, "write", copies_of([0], [0], [SIZES[1]], 1, 0))
            require(second.poll() == "done", f"a write is done ({second.error})")
            require(bool((far.read(0)[: SIZES[1]] == round_).all()), "nothing of an operation arrives after it is done")


def _check_done_means_visible(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        for round_ in range(50):
            here.regions[1][:] = round_
            operation = here.run(peer, "write", copies_of([0], [0], [SIZES[1]], 1, 1))
            require(operation.poll() == "done", f"a write is done ({operation.error})")
            require(bool((far.read(1) == round_).all()), "the owner sees all bytes once the operation is done")


def _check_refuses_out_of_bounds(here: NearSide) -> None:
    with here.far() as far:
        peer = here.transport.connect(far.descriptor).result(WAIT_S)
        before = far.read(0)
        huge = 2**63 - 1
        bad = [
            copies_of([0], [SIZES[0] - 4], [8]),
            copies_of([SIZES[0]], [0], [1]),
            copies_of([-1], [0], [8]),
            copies_of([0], [-8], [16]),
            copies_of([0], [0], [-1]),
            copies_of([0, 0], [0, huge - 3], [4, 8]),
            copies_of([huge], [0], [huge]),
            copies_of([0], [0], [1], 2, 0),
            copies_of([0], [0], [1], 0, -1),
        ]
        for copies in bad:
            for direction in ("write", "read"):
                try:
                    here.transport.submit(peer, direction, copies, "bad")
                except ProtocolError:
                    continue
                raise AssertionError(f"expected that a {direction} outside a region is refused: {copies}")
        require(np.array_equal(far.read(0), before), "a refused copy moves no byte")


_CHECKS: tuple[Callable[[NearSide], None], ...] = (
    _check_copies_exactly,
    _check_moves_large_regions,
    _check_copies_many_runs,
    _check_keeps_order,
    _check_done_means_visible,
    _check_refuses_out_of_bounds,
    ends.check_cancel_is_quiet,
    ends.check_survives_a_closed_peer,
    ends.check_survives_a_killed_peer,
    ends.check_survives_a_peer_killed_while_copying,
    ends.check_a_failure_stays_with_its_peer,
    ends.check_reconnects,
    ends.check_waits_for_no_peer,
    ends.check_keeps_two_peers_apart,
    ends.check_refuses_misuse,
)
