"""Row operations between products: norms, and the input of a drafter's first layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit
from baton.kernels.cpu.elementwise import norm_row
from baton.kernels.cpu.fused.fields import (
    ADDS_NORMED,
    EMBEDDING,
    EPS,
    FEEDBACK,
    FEEDS_NORMED,
    FINAL_NORM,
    HIDDEN,
    HIDDEN_NORM,
    IDS,
    INPUT_NORM,
    NORMED,
    NUM_ROWS,
    NUM_SAMPLED,
    OUTPUTS,
    SAMPLED,
    SOURCES,
    STATES,
    X,
)
from baton.kernels.cpu.fused.stages import finish, take_piece
from baton.kernels.cpu.omp import float_of, pointer

# Rows that a thread takes at a time.
ROWS_AT_ONCE = 4
BF16, ELEMENT_BYTES = np.uint16(0), 2


@jit
def copy_row(source: int, size: int, to: int) -> None:
    x, kept = carray(pointer(source, BF16), (size,)), carray(pointer(to, BF16), (size,))
    for i in range(size):
        kept[i] = x[i]


@jit
def number_at(address: int, index: int) -> Any:
    """An element of an int64 array."""
    return carray(pointer(address, np.int64(0)), (index + 1,))[index]


@jit
def norms(a: Any, weight: int, features: int, stage: int) -> None:
    size, num_rows, eps = a[HIDDEN], a[NUM_ROWS], float_of(a[EPS])
    total, mine = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, 0
    block = take_piece(stage)
    while block < total:
        for t in range(block * ROWS_AT_ONCE, min((block + 1) * ROWS_AT_ONCE, num_rows)):
            row = t * size * ELEMENT_BYTES
            norm_row(BF16, a[X] + row, weight, size, eps, a[NORMED] + row)
            if features != 0:
                copy_row(a[X] + row, size, features + row)
        mine += 1
        block = take_piece(stage)
    finish(stage, mine, total)


@jit
def join(a: Any, layer: Any, stage: int) -> None:
    """The input of a drafter's first layer: the norms of a token's embedding and of a state side by side."""
    size, num_rows, eps = a[HIDDEN], a[NUM_ROWS], float_of(a[EPS])
    total, mine, row_bytes = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, 0, size * ELEMENT_BYTES
    block = take_piece(stage)
    while block < total:
        for t in range(block * ROWS_AT_ONCE, min((block + 1) * ROWS_AT_ONCE, num_rows)):
            source = t if a[SOURCES] == 0 else number_at(a[SOURCES], t)
            state, joined = a[STATES] + source * row_bytes, a[NORMED] + 2 * t * row_bytes
            embedding = a[EMBEDDING] + number_at(a[IDS], source) * row_bytes
            norm_row(BF16, embedding, layer[INPUT_NORM], size, eps, joined)
            norm_row(BF16, state, layer[HIDDEN_NORM], size, eps, joined + row_bytes)
            copy_row(joined + row_bytes if layer[ADDS_NORMED] else state, size, a[X] + t * row_bytes)
        mine += 1
        block = take_piece(stage)
    finish(stage, mine, total)


@jit
def final_norms(a: Any, stage: int) -> None:
    """Outputs and feedback of the sampled rows."""
    size, num_rows, eps = a[HIDDEN], a[NUM_SAMPLED], float_of(a[EPS])
    total, mine, row_bytes = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, 0, size * ELEMENT_BYTES
    block = take_piece(stage)
    while block < total:
        for n in range(block * ROWS_AT_ONCE, min((block + 1) * ROWS_AT_ONCE, num_rows)):
            t = n if a[SAMPLED] == 0 else number_at(a[SAMPLED], n)
            x, out = a[X] + t * row_bytes, a[OUTPUTS] + n * row_bytes
            norm_row(BF16, x, a[FINAL_NORM], size, eps, out)
            copy_row(out if a[FEEDS_NORMED] else x, size, a[FEEDBACK] + n * row_bytes)
        mine += 1
        block = take_piece(stage)
    finish(stage, mine, total)
