"""A tile of 64 keys and 16 vectors in tiles of Intel AMX: each vector is a lane, or a column of a tile.

Online softmax in powers of 2. A maximum follows scores only if they exceed it by `_SLACK`, so that sums are seldom
multiplied: weights of more than 1 cost no precision. A weight is split into two bfloat16 numbers, which lose 2^-16.

Shapes: D elements of a key or value, a multiple of 32. All arrays are addresses of whole cache lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.kernels.cpu.attention.online_softmax import TILE
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, constant, fma, i64, larger, load, splat, store
from baton.kernels.cpu.tiles import (
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_PAIRS,
    TILE_ROWS,
    add_product,
    load_tile,
    store_tile,
    zero,
)

LOG2_E = 1.4426950408889634
# In powers of 2.
_SLACK = 8.0
# Of 2^x, 0 <= x < 1, highest power first (least squares; an error of 2^-18).
_POWER = (1.3426686e-2, 5.2242471e-2, 2.4128021e-1, 6.9304484e-1, 1.0)
_WHOLE_TILE_BYTES = TILE_ROWS * TILE_BYTES
_KEY_GROUPS = TILE // TILE_ROWS
STEPS = TILE // TILE_COLUMNS
# Parts of a weight.
PARTS = 2
WEIGHT_BYTES = PARTS * STEPS * TILE_PAIRS * TILE_BYTES
# Tiles of weights, and of queries.
_WEIGHTS, _QUERIES = (4, 5, 6, 7), 6
_ROUND_DOWN, _CURRENT_MODE = 1, 4
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_EVERY_LANE = ir.Constant(_I16, -1)


def _scored(typing_context: Any, keys: Any, queries: Any, steps: Any, scores: Any) -> Any:
    """scores [64, 16] float32 = keys [64, D] times queries [D / 2, 16, 2] of bfloat16, D = 32 * `steps`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keys, queries, steps, scores = args
        key_bytes = builder.mul(steps, i64(TILE_BYTES))
        group_bytes = builder.mul(key_bytes, i64(TILE_ROWS))
        for group in range(_KEY_GROUPS):
            zero(builder, group)
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            at = builder.add(queries, builder.mul(loop.index, i64(_WHOLE_TILE_BYTES)))
            load_tile(builder, _QUERIES, at, i64(TILE_BYTES))
            at = builder.add(keys, builder.mul(loop.index, i64(TILE_BYTES)))
            for group in range(_KEY_GROUPS):
                left = _KEY_GROUPS + group % 2
                load_tile(builder, left, at, key_bytes)
                add_product(builder, group, left, _QUERIES)
                at = builder.add(at, group_bytes)
        for group in range(_KEY_GROUPS):
            store_tile(builder, group, builder.add(scores, i64(_WHOLE_TILE_BYTES * group)), i64(TILE_BYTES))
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 4), generate


def _summed(typing_context: Any, values: Any, weights: Any, sums: Any, size: Any) -> Any:
    """sums [D, 16] float32 += values [D, 64] times weights [2, 32, 16, 2] of bfloat16, both parts of them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, weights, sums, size = args
        for number, right in enumerate(_WEIGHTS):
            at = builder.add(weights, i64(_WHOLE_TILE_BYTES * number))
            load_tile(builder, right, at, i64(TILE_BYTES))
        value_bytes = TILE_BYTES * STEPS
        with cgutils.for_range(builder, builder.sdiv(size, i64(2 * TILE_ROWS)), intp=_I64) as loop:
            for total in range(2):
                row = builder.add(builder.mul(loop.index, i64(2 * TILE_ROWS)), i64(TILE_ROWS * total))
                here = builder.add(sums, builder.mul(row, i64(TILE_BYTES)))
                load_tile(builder, total, here, i64(TILE_BYTES))
                at = builder.add(values, builder.mul(row, i64(value_bytes)))
                for step in range(STEPS):
                    load_tile(builder, 2 + step, builder.add(at, i64(TILE_BYTES * step)), i64(value_bytes))
                for number, right in enumerate(_WEIGHTS):
                    add_product(builder, total, 2 + number % STEPS, right)
                store_tile(builder, total, here, i64(TILE_BYTES))
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 4), generate


def power_of_2(builder: Any, x: Any) -> Any:
    """2^x with an error of 2^-18; 0 for -infinity."""
    fraction = _call(builder, "reduce", x, ir.Constant(_I32, _ROUND_DOWN), x)
    value = constant(builder, _POWER[0])
    for coefficient in _POWER[1:]:
        value = fma(builder, value, fraction, constant(builder, coefficient))
    return _call(builder, "scalef", value, x, value)


def _call(builder: Any, name: str, *args: Any) -> Any:
    args = (*args, _EVERY_LANE, ir.Constant(_I32, _CURRENT_MODE))
    function_type = ir.FunctionType(_VECTOR, [arg.type for arg in args])
    name = f"llvm.x86.avx512.mask.{name}.ps.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def visibility(builder: Any, seen: Any, base: Any, window: Any) -> Callable[[Any], Any]:
    """A function of the number of each lane's key: the mask of the vectors that see it."""
    last = builder.sub(load(builder, seen, 0, _WORDS), splat(builder, builder.trunc(base, _I32)))
    first = builder.sub(last, splat(builder, builder.trunc(window, _I32)))
    is_all = splat(builder, builder.icmp_signed("==", window, i64(0)))

    def mask(number: Any) -> Any:
        is_near = builder.or_(is_all, builder.icmp_signed("<", first, number))
        return builder.and_(is_near, builder.icmp_signed(">=", last, number))

    return mask


def _softened(
    typing_context: Any, is_masked: Any, scores: Any, factor: Any, seen: Any, base: Any, window: Any, maximum: Any,
    total: Any, weights: Any, faded: Any,
) -> Any:  # fmt: skip
    """weights [2, 32, 16, 2] bfloat16 = 2^(scores * factor - maximum), `factor` positive. Updates `maximum` and `total`
    [16]. Returns whether any `faded` [16] is not 1: what earlier sums are multiplied by.

    `is_masked`, a literal: a vector sees keys up to `seen` [16] int32 - `base` alone, the last `window` (0: all).
    """
    masks = bool(is_masked.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, scores, factor, seen, base, window, maximum, total, weights, faded = args
        visible = visibility(builder, seen, base, window) if masks else None

        def masked(key: int, vector: Any, hidden: float) -> Any:
            if visible is None:
                return vector
            number = ir.Constant(_WORDS, [key] * LANES)
            return builder.select(visible(number), vector, constant(builder, hidden))

        most: list[Any] = [None] * CHUNKS
        for key in range(TILE):
            score, part = masked(key, load(builder, scores, TILE_BYTES * key), float("-inf")), key % CHUNKS
            most[part] = score if key < CHUNKS else larger(builder, most[part], score)
        factor, before = splat(builder, factor), load(builder, maximum)
        peak = larger(builder, larger(builder, most[0], most[2]), larger(builder, most[1], most[3]))
        grows, peak = raised(builder, before, builder.fmul(peak, factor))
        minus, sums = builder.fneg(peak), [constant(builder, 0.0)] * CHUNKS
        for pair in range(TILE // 2):
            halves = []
            for key in (2 * pair, 2 * pair + 1):
                x = fma(builder, load(builder, scores, TILE_BYTES * key), factor, minus)
                weight = masked(key, power_of_2(builder, x), 0.0)
                sums[key % CHUNKS] = builder.fadd(sums[key % CHUNKS], weight)
                halves.append(weight)
            for part, words in enumerate(split(builder, *halves)):
                store(builder, words, weights, WEIGHT_BYTES // PARTS * part + TILE_BYTES * pair)
        added = builder.fadd(builder.fadd(sums[0], sums[2]), builder.fadd(sums[1], sums[3]))
        fading = faded_by(builder, grows, before, peak)
        store(builder, fma(builder, load(builder, total), fading, added), total)
        store(builder, peak, maximum)
        store(builder, fading, faded)
        return any_lane(builder, grows)

    arguments = (numba.int64, numba.float32, *[numba.int64] * 7)
    return numba.boolean(is_masked, *arguments), generate


def raised(builder: Any, before: Any, most: Any) -> tuple[Any, Any]:
    """Whether a maximum follows the greatest of new scores, and the maximum then."""
    grows = builder.fcmp_ordered(">", most, builder.fadd(before, constant(builder, _SLACK)))
    return grows, builder.select(grows, most, before)


def faded_by(builder: Any, grows: Any, before: Any, peak: Any) -> Any:
    """What sums under the maximum `before` are multiplied by."""
    return builder.select(grows, power_of_2(builder, builder.fsub(before, peak)), constant(builder, 1.0))


def any_lane(builder: Any, lanes: Any) -> Any:
    return builder.icmp_unsigned("!=", builder.bitcast(lanes, _I16), ir.Constant(_I16, 0))


def split(builder: Any, low: Any, high: Any) -> list[Any]:
    """Two vectors of float32 as the halves of words: bfloat16, then what that leaves, both rounded towards 0."""
    shift, upper = (splat(builder, ir.Constant(_I32, number)) for number in (16, -(1 << 16)))
    parts = []
    for _ in range(PARTS):
        bits = [builder.bitcast(vector, _WORDS) for vector in (low, high)]
        cut = [builder.and_(word, upper) for word in bits]
        parts.append(builder.or_(builder.lshr(bits[0], shift), cut[1]))
        low, high = (builder.fsub(v, builder.bitcast(c, _VECTOR)) for v, c in zip((low, high), cut, strict=True))
    return parts


def _faded(typing_context: Any, sums: Any, size: Any, factors: Any) -> Any:
    """sums [D, 16] times factors [16]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, size, factors = args
        factor = load(builder, factors)
        with cgutils.for_range(builder, size, intp=_I64) as loop:
            at = builder.add(sums, builder.mul(loop.index, i64(TILE_BYTES)))
            store(builder, builder.fmul(load(builder, at), factor), at)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 3), generate


def interleaving(halves: Sequence[Sequence[int]]) -> Any:
    """The intrinsic: out [count, 2] from two rows of `count` bfloat16 numbers, a multiple of 32. Of each 32 come those
    of the first of `halves`, then the others."""

    def interleaved(typing_context: Any, first: Any, second: Any, count: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first, second, count, out = args
            with cgutils.for_range(builder, builder.sdiv(count, i64(TILE_COLUMNS)), intp=_I64) as loop:
                interleave_line(builder, (first, second), builder.mul(loop.index, i64(TILE_BYTES)), out, halves)
            return context.get_dummy_value()

        return numba.void(*[numba.int64] * 4), generate

    return interleaved


def interleave_line(builder: Any, pair: Sequence[Any], offset: Any, out: Any, halves: Sequence[Sequence[int]]) -> None:
    rows = [load(builder, at, offset, ir.VectorType(_I16, TILE_COLUMNS)) for at in pair]
    to = builder.add(out, builder.mul(offset, i64(2)))
    for half, numbers in enumerate(halves):
        lanes = [number + other for number in numbers for other in (0, TILE_COLUMNS)]
        mask = ir.Constant(ir.VectorType(_I32, TILE_COLUMNS), lanes)
        store(builder, builder.shuffle_vector(*rows, mask), to, TILE_BYTES * half)


def _checked(typing_context: Any, numbers: Any, num_lines: Any) -> Any:
    """Whether so many cache lines of bfloat16 are finite."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, num_lines = args
        row = ir.VectorType(_I16, 2 * LANES)
        infinite = ir.Constant(row, [0x7F80] * 2 * LANES)
        found = cgutils.alloca_once_value(builder, ir.Constant(_I32, 0))
        with cgutils.for_range(builder, num_lines, intp=_I64) as loop:
            bits = load(builder, numbers, builder.mul(loop.index, i64(TILE_BYTES)), row)
            odd = builder.icmp_unsigned("==", builder.and_(bits, infinite), infinite)
            builder.store(builder.or_(builder.load(found), builder.bitcast(odd, _I32)), found)
        return builder.icmp_unsigned("==", builder.load(found), ir.Constant(_I32, 0))

    return numba.boolean(numba.int64, numba.int64), generate


_Call = Callable[..., Any]
score = cast(_Call, intrinsic(_scored))
soften = cast(_Call, intrinsic(prefer_literal=True)(_softened))
add_values = cast(_Call, intrinsic(_summed))
fade = cast(_Call, intrinsic(_faded))
interleave = cast(_Call, intrinsic(interleaving((range(LANES), range(LANES, 2 * LANES)))))
are_finite = cast(_Call, intrinsic(_checked))
