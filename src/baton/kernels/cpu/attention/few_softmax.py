"""As `tiled_softmax`, with its bits, for the few vectors of a few rows: a register holds the scores of several keys.

N vectors, 4, 8 or 16, of which a register holds 16 / N keys. Weights become rows of a tile, so that values need not be
transposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.kernels.cpu.attention.online_softmax import F32_BYTES
from baton.kernels.cpu.attention.tiled_softmax import (
    PARTS,
    STEPS,
    any_lane,
    faded_by,
    interleave_line,
    interleaving,
    power_of_2,
    raised,
    split,
    visibility,
)
from baton.kernels.cpu.simd import (
    CHUNKS,
    LANES,
    cgutils,
    constant,
    fma,
    i64,
    larger,
    load,
    shuffled,
    splat,
    store,
    store_rounded,
)
from baton.kernels.cpu.tiles import (
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_PAIRS,
    TILE_ROWS,
    add_product,
    configure,
    load_tile,
    store_tile,
    zero,
)

# Tiles: scores, keys and queries; then sums, weights and values.
_SCORES, _KEYS, _QUERIES, _SUMS, _WEIGHTS, _VALUES = 0, 1, 2, 3, 4, (5, 6)
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WORDS = ir.VectorType(_I32, LANES)
_QUARTER = LANES // 4
# Pairs in this order take one instruction. It is that of the sums.
_HALVES = [[number for number in range(2 * LANES) if number // _QUARTER % 2 == half] for half in range(2)]


def _begun(typing_context: Any, num_vectors: Any, used: Any) -> Any:
    vectors = num_vectors.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        heights = dict.fromkeys((_SCORES, _KEYS, _QUERIES, *_VALUES), i64(TILE_ROWS))
        heights |= dict.fromkeys((_SUMS, _WEIGHTS), args[1])
        configure(builder, heights, dict.fromkeys((_SCORES, _QUERIES), F32_BYTES * vectors))
        return context.get_dummy_value()

    return numba.void(num_vectors, numba.int64), generate


def _scored(
    typing_context: Any, num_vectors: Any, keys: Any, key_bytes: Any, queries: Any, steps: Any, scores: Any
) -> Any:
    """scores [16, N] float32 = keys [16, D], `key_bytes` apart, times queries [D / 2, 16, 2], D = 32 * `steps`."""
    vectors = num_vectors.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, keys, key_bytes, queries, steps, scores = args
        zero(builder, _SCORES)
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            at = builder.add(queries, builder.mul(loop.index, i64(TILE_BYTES * TILE_PAIRS)))
            load_tile(builder, _QUERIES, at, i64(TILE_BYTES))
            load_tile(builder, _KEYS, builder.add(keys, builder.mul(loop.index, i64(TILE_BYTES))), key_bytes)
            add_product(builder, _SCORES, _KEYS, _QUERIES)
        store_tile(builder, _SCORES, scores, i64(F32_BYTES * vectors))
        return context.get_dummy_value()

    return numba.void(num_vectors, *[numba.int64] * 5), generate


def _softened(
    typing_context: Any, num_vectors: Any, is_masked: Any, steps: Any, scores: Any, factor: Any, seen: Any, base: Any,
    window: Any, maximum: Any, total: Any, weights: Any, faded: Any,
) -> Any:  # fmt: skip
    """weights [2, 2, N, 32] bfloat16: a tile for each part and step of 32 keys, up to `steps`. Lane i of `seen`,
    `maximum`, `total` and `faded` is that of vector i % N."""
    vectors, masks = num_vectors.literal_value, bool(is_masked.literal_value)
    together = LANES // vectors
    count, classes = TILE_COLUMNS // together, max(1, CHUNKS // together)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, steps, scores, factor, seen, base, window, maximum, total, weights, faded = args
        visible = visibility(builder, seen, base, window) if masks else None

        def masked(step: Any, number: int, vector: Any, hidden: float) -> Any:
            if visible is None:
                return vector
            keys = ir.Constant(_WORDS, [number * together + lane // vectors for lane in range(LANES)])
            first = splat(builder, builder.trunc(builder.mul(step, i64(TILE_COLUMNS)), _I32))
            return builder.select(visible(builder.add(keys, first)), vector, constant(builder, hidden))

        def rows_of(step: Any) -> list[Any]:
            at = builder.add(scores, builder.mul(step, i64(TILE_BYTES * count)))
            return [load(builder, at, TILE_BYTES * number) for number in range(count)]

        most = cgutils.alloca_once_value(builder, constant(builder, float("-inf")))
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            shown = [masked(loop.index, number, row, float("-inf")) for number, row in enumerate(rows_of(loop.index))]
            while len(shown) > 1:
                shown = [larger(builder, *pair) for pair in zip(shown[::2], shown[1::2], strict=True)]
            builder.store(larger(builder, builder.load(most), shown[0]), most)
        factor, before = splat(builder, factor), load(builder, maximum)
        peak = builder.fmul(_over_keys(builder, builder.load(most), vectors, larger), factor)
        grows, peak = raised(builder, before, peak)
        minus = builder.fneg(peak)
        # Keys that are equal modulo 4 are added in order.
        sums = [cgutils.alloca_once_value(builder, constant(builder, 0.0)) for _ in range(classes)]
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            powers = [power_of_2(builder, fma(builder, row, factor, minus)) for row in rows_of(loop.index)]
            powers = [masked(loop.index, number, power, 0.0) for number, power in enumerate(powers)]
            for number, power in enumerate(powers):
                at = sums[number % classes]
                builder.store(builder.fadd(builder.load(at), power), at)
            to = builder.add(weights, builder.mul(loop.index, i64(TILE_BYTES * vectors)))
            for part, halves in enumerate(_as_rows(builder, powers, vectors)):
                for row, vector in enumerate(halves):
                    store(builder, vector, to, TILE_BYTES * (vectors * STEPS * part + row))
        added = [builder.load(at) for at in sums]
        while len(added) > 1:
            half = len(added) // 2
            added = [builder.fadd(*pair) for pair in zip(added[:half], added[half:], strict=True)]
        whole = _over_keys(builder, added[0], vectors, lambda builder, a, b: builder.fadd(a, b))
        fading = faded_by(builder, grows, before, peak)
        store(builder, fma(builder, load(builder, total), fading, whole), total)
        store(builder, peak, maximum)
        store(builder, fading, faded)
        return any_lane(builder, grows)

    arguments = (numba.int64, numba.int64, numba.float32, *[numba.int64] * 7)
    return numba.boolean(num_vectors, is_masked, *arguments), generate


def _over_keys(builder: Any, vector: Any, vectors: int, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine a register's keys, halves first, in each lane."""
    distance = LANES // 2
    while distance >= vectors:
        other = shuffled(builder, vector, vector, [(lane + distance) % LANES for lane in range(LANES)])
        vector, distance = combine(builder, vector, other), distance // 2
    return vector


def _as_rows(builder: Any, powers: Sequence[Any], vectors: int) -> list[list[Any]]:
    """Both parts of the weights of 32 keys: N rows of pairs."""
    keys = LANES // vectors
    labels = [(key, vector) for key in range(keys) for vector in range(vectors)]
    parts: list[list[Any]] = [[], []]
    for a, b in zip(powers[::2], powers[1::2], strict=True):
        both = labels + [(keys + key, vector) for key, vector in labels]
        sides = [
            shuffled(builder, a, b, [lane for lane, (key, _) in enumerate(both) if key % 2 == side]) for side in (0, 1)
        ]
        for part, words in zip(parts, split(builder, *sides), strict=True):
            part.append(words)
    return [_untangled(builder, part) for part in parts]


def _untangled(builder: Any, registers: Sequence[Any]) -> list[Any]:
    """Registers of pairs [16 / N, N] as one register for each of N vectors."""
    vectors = len(registers)
    if vectors == 1:
        return list(registers)
    both = [lane % vectors for lane in range(2 * LANES)]
    halves = []
    for is_late in (False, True):
        lanes = [lane for lane, vector in enumerate(both) if (vector >= vectors // 2) == is_late]
        pairs = zip(registers[::2], registers[1::2], strict=True)
        halves.append([shuffled(builder, a, b, lanes) for a, b in pairs])
    return [row for half in halves for row in _untangled(builder, half)]


def _summed(
    typing_context: Any, num_vectors: Any, num_steps: Any, pairs: Any, weights: Any, sums: Any, size: Any
) -> Any:
    """sums [N, D] float32 += weights, both parts, times pairs [32, D, 2] of bfloat16; of 32 keys for one step."""
    vectors, steps = num_vectors.literal_value, num_steps.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, pairs, weights, sums, size = args
        row_bytes = builder.mul(size, i64(F32_BYTES))
        step_bytes = builder.mul(row_bytes, i64(TILE_PAIRS))
        with cgutils.for_range(builder, builder.sdiv(size, i64(LANES)), intp=_I64) as loop:
            column = builder.mul(loop.index, i64(TILE_BYTES))
            here = builder.add(sums, column)
            load_tile(builder, _SUMS, here, row_bytes)
            for step, tile in enumerate(_VALUES[:steps]):
                at = builder.add(pairs, builder.mul(step_bytes, i64(step)))
                load_tile(builder, tile, builder.add(at, column), row_bytes)
            for part, step in itertools.product(range(PARTS), range(steps)):
                at = builder.add(weights, i64(TILE_BYTES * vectors * (STEPS * part + step)))
                load_tile(builder, _WEIGHTS, at, i64(TILE_BYTES))
                add_product(builder, _SUMS, _WEIGHTS, _VALUES[step])
            store_tile(builder, _SUMS, here, row_bytes)
        return context.get_dummy_value()

    return numba.void(num_vectors, num_steps, *[numba.int64] * 4), generate


def _faded(typing_context: Any, num_vectors: Any, sums: Any, size: Any, factors: Any) -> Any:
    """sums [N, D] times factors [N]."""
    vectors = num_vectors.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, sums, size, factors = args
        row_bytes = builder.mul(size, i64(F32_BYTES))
        for vector in range(vectors):
            factor = splat(builder, load(builder, factors, F32_BYTES * vector, _F32))
            row = builder.add(sums, builder.mul(row_bytes, i64(vector)))
            with cgutils.for_range(builder, builder.sdiv(size, i64(LANES)), intp=_I64) as loop:
                at = builder.add(row, builder.mul(loop.index, i64(TILE_BYTES)))
                store(builder, builder.fmul(load(builder, at), factor), at)
        return context.get_dummy_value()

    return numba.void(num_vectors, *[numba.int64] * 3), generate


def _interleaved(typing_context: Any, values: Any, row_bytes: Any, size: Any, out: Any) -> Any:
    """As `interleave`, out [8, D, 2] from 16 rows, `row_bytes` apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, row_bytes, size, out = args
        rows = [builder.add(values, builder.mul(row_bytes, i64(row))) for row in range(LANES)]
        tos = [builder.add(out, builder.mul(size, i64(F32_BYTES * pair))) for pair in range(LANES // 2)]
        with cgutils.for_range(builder, builder.sdiv(size, i64(TILE_COLUMNS)), intp=_I64) as loop:
            offset = builder.mul(loop.index, i64(TILE_BYTES))
            for pair, to in enumerate(tos):
                interleave_line(builder, rows[2 * pair : 2 * pair + 2], offset, to, _HALVES)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 4), generate


def _divided(typing_context: Any, sums: Any, size: Any, total: Any, out: Any) -> Any:
    """out [D] bfloat16 = sums [D] float32, in the order of `interleave`, over `total`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, size, total, out = args
        total = splat(builder, total)
        with cgutils.for_range(builder, builder.sdiv(size, i64(2 * LANES)), intp=_I64) as loop:
            at = builder.add(sums, builder.mul(loop.index, i64(2 * TILE_BYTES)))
            halves = [builder.fdiv(load(builder, at, TILE_BYTES * half), total) for half in range(2)]
            places = [LANES * half + lane for lane in range(0, LANES, _QUARTER) for half in range(2)]
            for half in range(2):
                begins = places[half * len(places) // 2 : (half + 1) * len(places) // 2]
                lanes = [begin + lane for begin in begins for lane in range(_QUARTER)]
                to = builder.add(out, builder.add(builder.mul(loop.index, i64(TILE_BYTES)), i64(2 * LANES * half)))
                store_rounded(builder, shuffled(builder, halves[0], halves[1], lanes), to, 2)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.float32, numba.int64), generate


_Call = Callable[..., Any]
begin_tiles = cast(_Call, intrinsic(prefer_literal=True)(_begun))
score = cast(_Call, intrinsic(prefer_literal=True)(_scored))
soften = cast(_Call, intrinsic(prefer_literal=True)(_softened))
add_values = cast(_Call, intrinsic(prefer_literal=True)(_summed))
interleave_block = cast(_Call, intrinsic(_interleaved))
interleave = cast(_Call, intrinsic(interleaving(_HALVES)))
divide = cast(_Call, intrinsic(_divided))
fade = cast(_Call, intrinsic(prefer_literal=True)(_faded))
