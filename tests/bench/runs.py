"""Counts runs in a block table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def num_runs(pages: Sequence[int]) -> int:
    """The number of runs of consecutive pages in a table."""
    table = np.asarray(pages)
    return int(np.count_nonzero(np.diff(table) != 1)) + 1 if table.size else 0
