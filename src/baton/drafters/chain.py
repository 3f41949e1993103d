"""What a drafter of several modules that are used one after the other needs beside its rows.

Module j (from 1) takes at entry i what module j - 1 made of entry i (the target's features for j = 1) and x_{i+j}. With
x_0..x_{n-1} known and rows up to e computed, its entries [0, min(e, n - j)) are known: the later a module, the fewer.
So its first new entry may lie one before those of the module before it, and what that made there is carried from step
to step, and from engine to engine: one row per module beyond the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def _none() -> npt.NDArray[np.float32]:
    return np.zeros((0, 0), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class ModuleChain:
    """Of R requests and K modules, K above 1.

    `spans` [R, K, 2]: start and stop of each module's entries that have become known; those of the first are the rows.
    `ahead`: per request the known tokens behind that of its last row, as many as the last module may take (K - 1).
    `carried` [C, E]: what was carried; `carried_row` [R, K - 1]: its row for each module beyond the first, -1 for none.
    """

    spans: IntArray
    ahead: Sequence[IntArray]
    carried_row: IntArray
    carried: npt.NDArray[np.float32] = field(default_factory=_none)
