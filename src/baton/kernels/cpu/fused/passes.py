"""Passes of bfloat16 rows through decoder layers in one parallel region. A drafter's pass ends with the choice of
tokens, with which the next begins. A pass may be an LM head.

Stages switch in a fraction of a microsecond (`stages`), so memory stays busy. They call standalone kernels' functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit_inline
from baton.kernels.cpu.fused.attention import attend
from baton.kernels.cpu.fused.choice import choose, head
from baton.kernels.cpu.fused.fields import (
    ATTENDED,
    DOWN,
    EMBEDDING,
    FC,
    FEATURES,
    FEATURES_IN,
    FEATURES_WIDTH,
    FINAL_NORM,
    GATE_UP,
    HEADS,
    HIDDEN,
    HIDDEN_NORM,
    INNER,
    INNERS,
    INPUT_NORM,
    KV_HEADS,
    LAYERS,
    MERGED,
    NORMED,
    NUM_ARGUMENTS,
    NUM_COLUMNS,
    NUM_FIELDS,
    NUM_LAYERS,
    NUM_PASSES,
    NUM_ROWS,
    NUM_SAMPLED,
    OUT,
    PASSES,
    PLACES,
    POST_NORM,
    QKV,
    SCRATCH,
    SIZE,
    STAGES,
    STAGES_PER_LAYER,
    STATES,
)
from baton.kernels.cpu.fused.products import SCRATCH_BYTES, gate, project
from baton.kernels.cpu.fused.rows import final_norms, join, norms, number_at
from baton.kernels.cpu.fused.stages import STAGE_BYTES
from baton.kernels.cpu.omp import Kernel, pointer, take


@jit_inline
def _layer(a: Any, int8: Any, number: int, layer: Any, scratch: int, is_last: bool) -> bool:
    hidden, inner, columns = a[HIDDEN], a[INNER], a[HIDDEN]
    queries = a[HEADS] * a[SIZE]
    merged = queries + 2 * a[KV_HEADS] * a[SIZE]
    stage = a[STAGES] + number * STAGES_PER_LAYER * STAGE_BYTES
    if layer[HIDDEN_NORM] != 0:
        join(a, layer, stage)
        columns = 2 * hidden
    else:
        norms(a, layer[INPUT_NORM], number_at(a[FEATURES], number), stage)
    project(a, int8, layer[QKV : QKV + 3], a[NORMED], columns, merged, a[MERGED], scratch, stage + STAGE_BYTES)
    place = carray(pointer(a[PLACES] + 8 * 3 * number, np.int64(0)), (3,))
    # Rows of a drafter that are not sampled need no output.
    is_wanted = not is_last or a[EMBEDDING] == 0 or a[NUM_SAMPLED] > 0
    if not attend(a, layer, place, is_wanted, stage + 3 * STAGE_BYTES):
        return False
    if is_wanted:
        project(a, int8, layer[OUT : OUT + 3], a[ATTENDED], queries, hidden, 0, scratch, stage + 5 * STAGE_BYTES)
        norms(a, layer[POST_NORM], 0, stage + 7 * STAGE_BYTES)
        gate(a, int8, layer[GATE_UP : GATE_UP + 3], scratch, stage + 8 * STAGE_BYTES)
        project(a, int8, layer[DOWN : DOWN + 3], a[INNERS], inner, hidden, 0, scratch, stage + 10 * STAGE_BYTES)
    return True


@jit_inline
def _pass(a: Any, int8: Any, thread: int) -> bool:
    """Returns False for a slot or page that does not exist."""
    num_layers, scratch = a[NUM_LAYERS], a[SCRATCH] + thread * a[NUM_ROWS] * SCRATCH_BYTES
    layers = carray(pointer(a[LAYERS], np.int64(0)), (num_layers, NUM_COLUMNS))
    stage = a[STAGES] + num_layers * STAGES_PER_LAYER * STAGE_BYTES
    if a[FEATURES_IN] != 0:
        weight, last = a[FC : FC + 3], stage + 4 * STAGE_BYTES
        project(a, int8, weight, a[FEATURES_IN], a[FEATURES_WIDTH], a[HIDDEN], a[STATES], scratch, last)
    for number in range(num_layers):
        if not _layer(a, int8, number, layers[number], scratch, number + 1 == num_layers):
            return False
    if a[NUM_SAMPLED] > 0:
        if a[FINAL_NORM] != 0:
            final_norms(a, stage)
        head(a, int8, scratch, stage + STAGE_BYTES)
        choose(a, stage + 3 * STAGE_BYTES)
    return True


@jit_inline
def _run_passes(arguments: Any, int8: Any) -> None:
    given = carray(arguments, NUM_ARGUMENTS)
    thread = take(arguments)
    passes = carray(pointer(given[PASSES], np.int64(0)), (given[NUM_PASSES], NUM_FIELDS))
    for number in range(given[NUM_PASSES]):
        if not _pass(passes[number], int8, thread):
            return


def _run_bfloat16(arguments: Any) -> None:
    _run_passes(arguments, None)


def _run_int8(arguments: Any) -> None:
    _run_passes(arguments, True)


# Neither compiles the other's products.
RUN_BFLOAT16, RUN_INT8 = Kernel(_run_bfloat16), Kernel(_run_int8)
