"""Additional inputs of a drafter with several modules that run one after the other (MTP).

Entry i of module j (from 1) is computed from the output of module j - 1 at entry i (the target's features for j = 1)
and from x_{i+j}. With x_0..x_{n-1} known and e target rows computed, entries [0, min(e, n - j)) of module j can be
computed. So a module's first new entry can precede those of the previous module, whose output is then carried to the
next step, and from P to D.
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
    """Shapes: R requests, K modules (K > 1).

    `spans` [R, K, 2]: start and stop of each module's new entries; those of the first module are the batch's rows.
    `ahead`: per request the known tokens after that of its last row, at most K - 1, for the later modules. `mtp_hidden`
    [C, E]: carried rows. `mtp_hidden_row` [R, K - 1]: the row for each module after the first, -1 for none.
    """

    spans: IntArray
    ahead: Sequence[IntArray]
    mtp_hidden_row: IntArray
    mtp_hidden: npt.NDArray[np.float32] = field(default_factory=_none)
