"""Fixtures of the transport suite: the near side, copy lists, expected bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from baton.kv.geometry import CopyList
from baton.testing.transport_peer import FarSide, NearbyPeer, SpawnedPeer
from baton.transports.base import ByteArray, Direction, Operation, Peer, Transport

WAIT_S = 60.0
CALLS_S = 4.0  # limit for calls that must not wait for a peer, which would take 5 s
SIZES = (1 << 16, 1 << 14)


@dataclass(slots=True)
class NearSide:
    """A near transport with its regions, and a factory of far sides."""

    factory: Callable[[], Transport]
    spawn_uri: str | None
    transport: Transport
    regions: list[Any]
    descriptor: bytes
    device: str | None = None

    @contextmanager
    def far(self, sizes: Sequence[int] = SIZES) -> Iterator[FarSide]:
        """A far side, its regions filled with seeds 100, 101, ..."""
        side: FarSide
        if self.spawn_uri is None:
            side = NearbyPeer(self.factory(), sizes, self.device)
        else:
            side = SpawnedPeer(self.spawn_uri, sizes, self.device)
        try:
            for i in range(len(sizes)):
                side.fill(i, 100 + i)
            yield side
        finally:
            side.close()

    def becomes_true(self, holds: Callable[[], bool]) -> bool:
        """False after `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def run(self, peer: Peer, direction: Direction, copies: CopyList) -> Operation:
        operation = self.transport.submit(peer, direction, copies, "check")
        require(operation.wait(WAIT_S) != "pending", "an operation ends")
        return operation


def require(holds: bool, what: str) -> None:
    """Raise `AssertionError` unless `holds`. A plain `assert` would be left out by `python -O`."""
    if not holds:
        raise AssertionError(f"expected that {what}")


def copies_of(
    source: ArrayLike, dest: ArrayLike, nbytes: ArrayLike, source_region: int = 0, dest_region: int = 0
) -> CopyList:
    columns = [np.array(column, dtype=np.int64).reshape(-1) for column in (source, dest, nbytes)]
    return CopyList(source_region, dest_region, *columns)


def copied_bytes(before: ByteArray, source: ByteArray, copies: CopyList) -> ByteArray:
    after: ByteArray = before.copy()
    for s, d, n in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
        after[d : d + n] = source[s : s + n]
    return after


def scattered_runs(runs: int, slot: int, seed: int) -> CopyList:
    """Runs of ragged length, in shuffled slots on both sides."""
    rng = np.random.default_rng(seed)
    places = [rng.permutation(runs) * slot for _ in range(2)]
    return copies_of(places[0], places[1], rng.integers(1, slot + 1, runs))
