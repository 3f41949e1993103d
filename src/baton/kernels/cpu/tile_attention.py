"""As `attention_tile`, in tiles of Intel AMX: keys and values of bfloat16, 16 vectors at a time.

Weights of values are split into two bfloat16 numbers, which lose 2^-17. A vector that sees a part of the 64 keys gets
them in float32, one by one: unseen values may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import jit
from baton.kernels.cpu.attention_tile import F32_BYTES, ROW_BLOCK, TILE, multiply, soften, tokens_seen
from baton.kernels.cpu.bf16_dot import rounded_pair
from baton.kernels.cpu.simd import (
    CHUNKS,
    LANES,
    cgutils,
    constant,
    fma,
    folded_lanes,
    larger,
    load,
    splat,
    store,
)
from baton.kernels.cpu.tiles import (
    LEFTS,
    RIGHTS,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_PAIRS,
    TILE_ROWS,
    add_product,
    begin_tiles,
    load_tile,
    store_tile,
    zero,
)

_NARROW_BYTES = 2
_STEPS = TILE // TILE_COLUMNS
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_ONE = np.float32(1.0)
_LOG2_E = 1.4426950408889634
# Of 2^x, |x| <= 1/2, highest power first (least squares).
_POWER = (1.33909e-3, 9.66637e-3, 5.550357e-2, 2.4022349e-1, 6.9314719e-1, 1.0)


def _scored(typing_context: Any, queries: Any, query_bytes: Any, keys: Any, steps: Any, scores: Any) -> Any:
    """scores [N, 64] float32 = queries [N, D] times keys [D / 2, 64, 2] of bfloat16, D = 32 * `steps`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries, query_bytes, keys, steps, scores = args
        key_bytes = ir.Constant(_I64, F32_BYTES * TILE)
        for chunk in range(CHUNKS):
            zero(builder, chunk)
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            column = builder.mul(loop.index, ir.Constant(_I64, TILE_BYTES))
            load_tile(builder, CHUNKS, builder.add(queries, column), query_bytes)
            here = builder.add(keys, builder.mul(loop.index, ir.Constant(_I64, TILE_PAIRS * F32_BYTES * TILE)))
            for chunk in range(CHUNKS):
                right = RIGHTS[chunk % 2]
                load_tile(builder, right, builder.add(here, ir.Constant(_I64, TILE_BYTES * chunk)), key_bytes)
                add_product(builder, chunk, CHUNKS, right)
        for chunk in range(CHUNKS):
            store_tile(builder, chunk, builder.add(scores, ir.Constant(_I64, TILE_BYTES * chunk)), key_bytes)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 5), generate


def _summed(typing_context: Any, weights: Any, low: Any, values: Any, sums: Any, sum_bytes: Any) -> Any:
    """sums [N, P] += (weights + low) [N, 64] times values [32, P, 2] of bfloat16, P = `sum_bytes` / 4."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, low, values, sums, sum_bytes = args
        parts = dict(zip(LEFTS[2:], [(at, step) for at in (weights, low) for step in range(_STEPS)], strict=True))
        for tile, (at, step) in parts.items():
            at = builder.add(at, ir.Constant(_I64, TILE_BYTES * step))
            load_tile(builder, tile, at, ir.Constant(_I64, _NARROW_BYTES * TILE))
        step_bytes = builder.mul(sum_bytes, ir.Constant(_I64, TILE_PAIRS))
        with cgutils.for_range(builder, builder.sdiv(sum_bytes, ir.Constant(_I64, 2 * TILE_BYTES)), intp=_I64) as loop:
            for total in range(2):
                column = builder.mul(loop.index, ir.Constant(_I64, 2 * TILE_BYTES))
                column = builder.add(column, ir.Constant(_I64, TILE_BYTES * total))
                here = builder.add(sums, column)
                load_tile(builder, total, here, sum_bytes)
                for step, right in enumerate(RIGHTS):
                    at = builder.add(builder.mul(step_bytes, ir.Constant(_I64, step)), column)
                    load_tile(builder, right, builder.add(values, at), sum_bytes)
                for tile, (_, step) in parts.items():
                    add_product(builder, total, tile, RIGHTS[step])
                store_tile(builder, total, here, sum_bytes)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 5), generate


def _scaled(typing_context: Any, numbers: Any, count: Any, factor: Any) -> Any:
    """Multiply `count` float32, a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, count, factor = args
        factor = splat(builder, factor)
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(_I64, LANES)), intp=_I64) as loop:
            at = builder.add(numbers, builder.mul(loop.index, ir.Constant(_I64, F32_BYTES * LANES)))
            store(builder, builder.fmul(load(builder, at), factor), at)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.float32), generate


def _power_of_2(builder: Any, x: Any) -> Any:
    """2^x for x up to about 0, at least 2^-100, with an error of 2^-22."""
    x = larger(builder, x, constant(builder, -100.0))
    magic = constant(builder, 12582912.0)
    shifted = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(shifted, magic))
    value = constant(builder, _POWER[0])
    for coefficient in _POWER[1:]:
        value = fma(builder, value, fraction, constant(builder, coefficient))
    # The lowest bits are the whole part.
    exponent = builder.shl(builder.bitcast(shifted, _WORDS), splat(builder, ir.Constant(_I32, 23)))
    return builder.bitcast(builder.add(builder.bitcast(value, _WORDS), exponent), _VECTOR)


def _weighed(typing_context: Any, scores: Any, scale: Any, maximum: Any, total: Any, high: Any, low: Any) -> Any:
    """Weights e^(score * scale - maximum) of 64 scores, each as a sum of two bfloat16 numbers. Updates a vector's
    maximum and total, which are addresses. Returns the factor on earlier weights. `scale` is positive."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, scale, maximum, total, high, low = args
        rows = [load(builder, scores, TILE_BYTES * chunk) for chunk in range(CHUNKS)]
        most = larger(builder, larger(builder, rows[0], rows[2]), larger(builder, rows[1], rows[3]))
        most = builder.fmul(folded_lanes(builder, most, larger), splat(builder, scale))
        before, log2e = splat(builder, load(builder, maximum, 0, _F32)), constant(builder, _LOG2_E)
        peak = larger(builder, before, most)
        minus, factor = builder.fneg(builder.fmul(peak, log2e)), builder.fmul(splat(builder, scale), log2e)
        weights = [_power_of_2(builder, fma(builder, row, factor, minus)) for row in rows]
        upper = splat(builder, ir.Constant(_I32, -(1 << 16)))
        cut = [builder.bitcast(builder.and_(builder.bitcast(one, _WORDS), upper), _VECTOR) for one in weights]
        rest = [builder.fsub(one, part) for one, part in zip(weights, cut, strict=True)]
        for parts, to in ((cut, high), (rest, low)):
            for chunk in range(0, CHUNKS, 2):
                store(builder, rounded_pair(builder, *parts[chunk : chunk + 2]), to, TILE_BYTES * chunk // 2)
        added = builder.fadd(builder.fadd(weights[0], weights[2]), builder.fadd(weights[1], weights[3]))
        added = folded_lanes(builder, added, lambda builder, a, b: builder.fadd(a, b))
        faded = _power_of_2(builder, builder.fmul(builder.fsub(before, peak), log2e))
        sums = fma(builder, splat(builder, load(builder, total, 0, _F32)), faded, added)
        for vector, at in ((peak, maximum), (sums, total)):
            store(builder, builder.extract_element(vector, ir.Constant(_I32, 0)), at)
        return builder.extract_element(faded, ir.Constant(_I32, 0))

    return numba.float32(numba.int64, numba.float32, *[numba.int64] * 4), generate


def _interleaved(typing_context: Any, first: Any, second: Any, count: Any, out: Any) -> Any:
    """out [count, 2] from two rows of `count` bfloat16 numbers, a multiple of 32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second, count, out = args
        width = 2 * LANES
        row = ir.VectorType(_I16, width)
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(_I64, width)), intp=_I64) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, _NARROW_BYTES * width))
            rows = [load(builder, at, offset, row) for at in (first, second)]
            to = builder.add(out, builder.mul(offset, ir.Constant(_I64, 2)))
            for half in range(2):
                lanes = [lane + other for lane in range(LANES * half, LANES * (half + 1)) for other in (0, width)]
                mask = ir.Constant(ir.VectorType(_I32, width), lanes)
                store(builder, builder.shuffle_vector(*rows, mask), to, TILE_BYTES * half)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 4), generate


_Call = Callable[..., Any]
_score = cast(_Call, intrinsic(_scored))
_sum = cast(_Call, intrinsic(_summed))
_scale = cast(_Call, intrinsic(_scaled))
_weigh = cast(_Call, intrinsic(_weighed))
interleave = cast(_Call, intrinsic(_interleaved))


@jit
def _find_edges(
    base: int, window: int, seen: Any, i: int, num_rows: int, low: Any, high: Any
) -> tuple[int, int, bool]:  # fmt: skip
    """The tokens [low, high) that each vector sees. Returns which vectors [first, last) see the whole tile, and whether
    any sees a token."""
    first, last, any_sees = num_rows, num_rows, False
    for j in range(num_rows):
        low[j], high[j] = tokens_seen(seen[i + j], base, window)
        any_sees = any_sees or low[j] < high[j]
        if low[j] == 0 and high[j] == TILE:
            first, last = min(first, j), j + 1
    return first, last, any_sees


@jit
def _weigh_row(
    scores: Any, scale: Any, vector: int, maxima: Any, totals: Any, sums: Any, width: int, high: Any, low: Any
) -> None:
    """Arrays are addresses."""
    at = vector * F32_BYTES
    factor = _weigh(scores, scale, maxima + at, totals + at, high, low)
    if factor != _ONE:
        _scale(sums + at * width, width, factor)


@jit
def attend_in_tiles(
    base: int, window: int, seen: Any, pairs: Any, keys: Any, packed: Any, values: Any, sums: Any, maxima: Any,
    totals: Any, scores: Any, weights: Any, factors: Any, edges: Any, scale: Any,
) -> None:  # fmt: skip
    """As `attend_tile`, with `pairs`. Values are `packed` [32, P, 2] in bfloat16 for vectors that see the whole tile,
    and float32 [64, P] for others. Scratch space: `scores` [16, 64], `weights` bfloat16 [2, 16, 64], `factors` [16],
    `edges` int64 [2, 16]. `pairs` and `sums` have whole groups of 16 rows, or of all. Called between `begin_tiles` of a
    group and `end_tiles`.
    """
    count, size, padded = len(seen), pairs.shape[1], sums.shape[1]
    keys_at, values_at, sums_at = np.int64(keys.ctypes.data), np.int64(values.ctypes.data), np.int64(sums.ctypes.data)
    scores_at, factors_at = np.int64(scores.ctypes.data), np.int64(factors.ctypes.data)
    pairs_at, packed_at, high_at = (
        np.int64(pairs.ctypes.data), np.int64(packed.ctypes.data), np.int64(weights.ctypes.data),
    )  # fmt: skip
    maxima_at, totals_at = np.int64(maxima.ctypes.data), np.int64(totals.ctypes.data)
    score_bytes, sum_bytes, weight_bytes = F32_BYTES * TILE, F32_BYTES * padded, _NARROW_BYTES * TILE
    low_at, low, high = high_at + weights.shape[1] * weight_bytes, edges[0], edges[1]
    at_once = min(TILE_ROWS, count)
    for i in range(0, count, at_once):
        num_rows = min(at_once, count - i)
        first, last, any_sees = _find_edges(base, window, seen, i, num_rows, low, high)
        if not any_sees:
            continue
        _score(pairs_at + i * size * _NARROW_BYTES, size * _NARROW_BYTES, keys_at, size // TILE_COLUMNS, scores_at)
        for j in range(num_rows):
            at = scores_at + j * score_bytes
            if first <= j < last:
                high_to, low_to = high_at + j * weight_bytes, low_at + j * weight_bytes
                _weigh_row(at, scale, i + j, maxima_at, totals_at, sums_at, padded, high_to, low_to)
            elif low[j] < high[j]:
                _scale(at, TILE, scale)
                factors[j] = soften(at, low[j], high[j], i + j, maxima, totals)
        if first < last:
            at = first * weight_bytes
            if last - first < num_rows:
                begin_tiles(last - first)
            _sum(high_at + at, low_at + at, packed_at, sums_at + (i + first) * sum_bytes, sum_bytes)
            if last - first < num_rows:
                begin_tiles(at_once)
        j = 0
        while j < num_rows:
            begin, together = j, 1
            while j + together < num_rows and together < ROW_BLOCK:
                if low[j + together] != low[j] or high[j + together] != high[j]:
                    break
                together += 1
            j += together
            if low[begin] < high[begin] and not first <= begin < last:
                multiply(
                    together, scores_at + begin * score_bytes + low[begin] * F32_BYTES, score_bytes,
                    values_at + low[begin] * sum_bytes, sum_bytes, high[begin] - low[begin],
                    factors_at + begin * F32_BYTES, sums_at + (i + begin) * sum_bytes, sum_bytes, padded,
                )  # fmt: skip


@jit
def attend_whole_tile(
    pairs: Any, keys: Any, packed: Any, sums: Any, maxima: Any, totals: Any, scores: Any, weights: Any, count: int,
    scale: Any,
) -> None:  # fmt: skip
    """As `attend_in_tiles` if all `count` vectors see the whole tile: tiles are multiplied while the weights of other
    vectors are computed. `scores` [2, 16, 64], `weights` [2, 2, 16, 64]."""
    size, padded = pairs.shape[1], sums.shape[1]
    keys_at, packed_at, sums_at = np.int64(keys.ctypes.data), np.int64(packed.ctypes.data), np.int64(sums.ctypes.data)
    scores_at, pairs_at, weights_at = (
        np.int64(scores.ctypes.data), np.int64(pairs.ctypes.data), np.int64(weights.ctypes.data),
    )  # fmt: skip
    maxima_at, totals_at = np.int64(maxima.ctypes.data), np.int64(totals.ctypes.data)
    score_bytes, sum_bytes, weight_bytes = F32_BYTES * TILE, F32_BYTES * padded, _NARROW_BYTES * TILE
    at_once, query_bytes, steps = scores.shape[1], size * _NARROW_BYTES, size // TILE_COLUMNS
    groups, part = (count + at_once - 1) // at_once, at_once * weight_bytes
    _score(pairs_at, query_bytes, keys_at, steps, scores_at)
    for group in range(groups):
        i, here = group * at_once, scores_at + group % 2 * at_once * score_bytes
        if group + 1 < groups:
            other = scores_at + (group + 1) % 2 * at_once * score_bytes
            _score(pairs_at + (i + at_once) * query_bytes, query_bytes, keys_at, steps, other)
        if group > 0:
            high_at = weights_at + (group - 1) % 2 * 2 * part
            _sum(high_at, high_at + part, packed_at, sums_at + (i - at_once) * sum_bytes, sum_bytes)
        high_at = weights_at + group % 2 * 2 * part
        for j in range(min(at_once, count - i)):
            at, to = here + j * score_bytes, high_at + j * weight_bytes
            _weigh_row(at, scale, i + j, maxima_at, totals_at, sums_at, padded, to, to + part)
    high_at = weights_at + (groups - 1) % 2 * 2 * part
    _sum(high_at, high_at + part, packed_at, sums_at + (groups - 1) * at_once * sum_bytes, sum_bytes)
