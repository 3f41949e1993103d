"""Cuts copy lists into batches for transfer libraries, which cannot stop a batch: a cancel takes effect between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.transports.base import Direction, Operation

Runs = NDArray[np.int64]
BATCH_RUNS = 1024
BATCH_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class Job:
    """`rows`: int64 `[runs, 3]`: own address, the peer's address, bytes; batch i is `rows[bounds[i]:bounds[i + 1]]`.
    `at`: number of finished batches. `handle`: the library's, of batch `at` once issued. `failed`: that batch failed;
    bytes may be outstanding."""

    operation: Operation
    direction: Direction
    rows: Runs
    bounds: list[int]
    at: int = 0
    handle: Any = None
    failed: bool = False

    @property
    def num_batches(self) -> int:
        return len(self.bounds) - 1

    def left(self) -> str | None:
        """The error if the operation ended now."""
        return None if self.at == self.num_batches else f"cancelled after {self.at} of {self.num_batches} batches"

    def batch(self) -> Runs:
        return self.rows[self.bounds[self.at] : self.bounds[self.at + 1]]


def make_job(operation: Operation, direction: Direction, rows: Runs) -> Job:
    rows = split_runs(rows, BATCH_BYTES)
    return Job(operation, direction, rows, batch_bounds(rows[:, 2], BATCH_RUNS, BATCH_BYTES))


def split_runs(rows: Runs, limit: int) -> Runs:
    """Cut runs into pieces of at most `limit` bytes; drop empty runs."""
    if len(rows) and int(rows[:, 2].min()) > 0 and int(rows[:, 2].max()) <= limit:
        return rows  # saves a million divisions
    pieces = -(-rows[:, 2] // limit)
    out = np.repeat(rows, pieces, axis=0)
    skip = (np.arange(len(out)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
    out[:, 2] = np.minimum(out[:, 2] - skip, limit)
    out[:, :2] += skip[:, None]
    return out


def batch_bounds(nbytes: Runs, max_runs: int, max_bytes: int) -> list[int]:
    """Batches of at most `max_runs` runs, and `max_bytes` bytes or a single run. Returns the cuts `[0, ..., runs]`."""
    if len(nbytes) and max_runs * int(nbytes.max()) <= max_bytes:
        return [*range(0, len(nbytes), max_runs), len(nbytes)]
    total = np.concatenate([[0], np.cumsum(nbytes)])
    bounds = [0]
    while bounds[-1] < len(nbytes):
        at = bounds[-1]
        reach = int(np.searchsorted(total, total[at] + max_bytes, side="right")) - 1
        bounds.append(max(at + 1, min(reach, at + max_runs, len(nbytes))))
    return bounds
