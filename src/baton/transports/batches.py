"""How a copy list is cut for a library: rows of addresses, in batches that a cancel can stop between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.transports.base import Direction, Operation

Rows = NDArray[np.int64]
BATCH_RUNS = 1024
BATCH_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class Job:
    """An operation under way. `rows` `[runs, 3]`: own address, the peer's address, bytes; batch i is
    `rows[bounds[i]:bounds[i + 1]]`. `handle` is the library's, of batch `at`, once that is issued; `failed` when that
    ended with an error, which does not prove that nothing of it is outstanding.
    """

    operation: Operation
    direction: Direction
    rows: Rows
    bounds: list[int]
    at: int = 0
    handle: Any = None
    failed: bool = False

    @property
    def num_batches(self) -> int:
        """Batches in all."""
        return len(self.bounds) - 1

    def left(self) -> str | None:
        """Why it fails if it ends here; None when all of it is copied."""
        return None if self.at == self.num_batches else f"cancelled after {self.at} of {self.num_batches} batches"

    def batch(self) -> Rows:
        """The rows of batch `at`."""
        return self.rows[self.bounds[self.at] : self.bounds[self.at + 1]]


def make_job(operation: Operation, direction: Direction, rows: Rows) -> Job:
    """Cut `rows` `[runs, 3]` into runs and batches of bounded size."""
    rows = split_runs(rows, BATCH_BYTES)
    return Job(operation, direction, rows, batch_bounds(rows[:, 2], BATCH_RUNS, BATCH_BYTES))


def split_runs(rows: Rows, limit: int) -> Rows:
    """Cut runs into pieces of at most `limit` bytes. Empty runs are left out."""
    pieces = -(-rows[:, 2] // limit)
    if bool((pieces == 1).all()):
        return rows
    out = np.repeat(rows, pieces, axis=0)
    skip = (np.arange(len(out)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
    out[:, 2] = np.minimum(out[:, 2] - skip, limit)
    out[:, :2] += skip[:, None]
    return out


def batch_bounds(nbytes: Rows, max_runs: int, max_bytes: int) -> list[int]:
    """Cuts `[0, ..., runs]` of runs of `nbytes` `[runs]` into batches of at most `max_runs` runs, and at most
    `max_bytes` bytes or a single run.
    """
    total = np.concatenate([[0], np.cumsum(nbytes)])
    bounds = [0]
    while bounds[-1] < len(nbytes):
        at = bounds[-1]
        reach = int(np.searchsorted(total, total[at] + max_bytes, side="right")) - 1
        bounds.append(max(at + 1, min(reach, at + max_runs, len(nbytes))))
    return bounds
