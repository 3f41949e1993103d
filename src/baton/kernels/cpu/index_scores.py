"""CPU kernel of the scores by which sparse attention chooses keys (DeepSeek-V3.2): the same bits for a row in every
batch.

Shapes: T rows, H index heads, D index head size, S keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.kernels.cpu.jit_cache import jit_contract
from baton.kernels.cpu.scalar import to_f32

_TILE = 64
_ZERO = np.float32(0.0)


@jit_contract
def score(plane: Any, pages: Any, positions: Any, queries: Any, weights: Any, out: Any) -> bool:
    """Scores of one request's rows: the sum over heads of weight times relu(q k), to `out` float32 [T, S].

    `plane` [pages, page_size, D] holds the keys, `pages` int32 [columns] the request's page ids. `queries` float32 [T,
    H, D], `weights` float32 [T, H]. Row t sees keys 0 .. `positions`[t] (ascending); other scores stay. Returns False
    for a page id outside the plane, or the null page.
    """
    page_size, size = plane.shape[1], plane.shape[2]
    heads = queries.shape[1]
    keys, dots, sums = np.zeros((size, _TILE), np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    last = positions[len(positions) - 1] + 1
    for base in range(0, last, _TILE):
        count = min(_TILE, last - base)
        for lane in range(count):
            column = (base + lane) // page_size
            if column >= len(pages) or pages[column] <= 0 or pages[column] >= plane.shape[0]:
                return False
            slot = base + lane - column * page_size
            for d in range(size):
                keys[d, lane] = to_f32(plane[pages[column], slot, d])
        for t in range(len(positions)):
            seen = min(_TILE, positions[t] + 1 - base)
            if seen <= 0:
                continue
            for j in range(_TILE):
                sums[j] = _ZERO
            for h in range(heads):
                for j in range(_TILE):
                    dots[j] = _ZERO
                for d in range(size):
                    q = queries[t, h, d]
                    for j in range(_TILE):
                        dots[j] += q * keys[d, j]
                weight = weights[t, h]
                for j in range(_TILE):
                    # Not max(): a NaN stays one.
                    sums[j] += weight * (_ZERO if dots[j] < _ZERO else dots[j])
            for j in range(seen):
                out[t, base + j] = sums[j]
    return True
