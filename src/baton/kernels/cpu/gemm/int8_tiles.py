"""Products with the weights of `int8_vnni` in tiles (Intel AMX): a group of columns is a tile's row.

Of sixteen rows, or the last ones, a group has all high bytes, all low ones, then scales and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import jit
from baton.kernels.cpu.gemm.int8_products import Int8Path
from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, groups_of, narrow_group
from baton.kernels.cpu.gemm.int8_vnni import BLOCK, SHIFT, STEP, VNNI, weights_of
from baton.kernels.cpu.gemm.small_gemm import num_pieces, outputs_of
from baton.kernels.cpu.simd import (
    LANES,
    cgutils,
    fma,
    has_features,
    i64,
    load,
    load_widened,
    prefetch,
    splat,
    store,
    store_rounded,
)
from baton.kernels.cpu.tiles import (
    HAS_TILES,
    RIGHTS,
    TILE_BYTES,
    TILE_ROWS,
    add_byte_product,
    begin_tiles,
    biases,
    end_tiles,
    load_tile,
    stack_space,
    store_tile,
    zero,
)

HAS_INT8_TILES = HAS_TILES and VNNI.runs_here and has_features("amx-int8")
# With fewer VNNI is faster.
_LEAST_ROWS = 12
_HIGH, _LOW = 4, 5
_STEP_BYTES, _GROUP_WEIGHTS = STEP * BLOCK, GROUP * BLOCK
_SUM_BYTES = TILE_ROWS * TILE_BYTES
# Groups.
_AHEAD = 5
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)


def _row_loop(builder: Any, num_rows: Any) -> Any:
    return cgutils.for_range(builder, num_rows, intp=_I64)


def _multiply_group(builder: Any, chunks: int, num_rows: Any, left: Any, right: Any, sums: Any, ahead: Any) -> None:
    """`ahead`: weights to fetch (0: none)."""
    part_bytes = _GROUP_WEIGHTS // chunks
    load_tile(builder, _HIGH, left, i64(TILE_BYTES))
    load_tile(builder, _LOW, builder.add(left, builder.mul(num_rows, i64(GROUP))), i64(TILE_BYTES))
    for chunk in range(chunks):
        with builder.if_then(builder.icmp_signed("!=", ahead, i64(0))):
            prefetch(builder, builder.add(ahead, i64(part_bytes * chunk)), part_bytes)
        weights = RIGHTS[chunk % 2]
        load_tile(builder, weights, builder.add(right, i64(TILE_BYTES * chunk)), i64(_STEP_BYTES))
        for part, rows in enumerate((_HIGH, _LOW)):
            total = 2 * (chunk % 2) + part
            zero(builder, total)
            add_byte_product(builder, total, rows, weights)
            store_tile(builder, total, builder.add(sums, i64((2 * chunk + part) * _SUM_BYTES)), i64(TILE_BYTES))


def _add_group(builder: Any, chunks: int, num_rows: Any, facts: Any, scale: Any, sums: Any, totals: Any) -> None:
    """As in `int8_products`. `facts`: rows' scales, minus their sums."""
    scales = [load_widened(builder, builder.add(scale, i64(2 * LANES * chunk)), 2) for chunk in range(chunks)]
    seven = splat(builder, ir.Constant(_I32, 7))
    with _row_loop(builder, num_rows) as loop:
        at = builder.add(facts, builder.mul(loop.index, i64(8)))
        one, minus = splat(builder, load(builder, at, 0, ir.FloatType())), splat(builder, load(builder, at, 4, _I32))
        row = builder.mul(loop.index, i64(TILE_BYTES))
        for chunk in range(chunks):
            here = builder.add(sums, row)
            high = builder.add(load(builder, here, 2 * chunk * _SUM_BYTES, _WORDS), minus)
            low = load(builder, here, (2 * chunk + 1) * _SUM_BYTES, _WORDS)
            exact = builder.add(builder.shl(high, seven), low)
            to = builder.add(builder.add(totals, row), i64(chunk * _SUM_BYTES))
            scaled = builder.fmul(scales[chunk], one)
            store(builder, fma(builder, builder.sitofp(exact, _VECTOR), scaled, load(builder, to)), to)


def _ahead(builder: Any, index: Any, groups: Any, right: Any, then: Any) -> Any:
    group = builder.add(index, i64(_AHEAD))
    is_within = builder.icmp_signed("<", group, groups)
    base = builder.select(is_within, right, then)
    group = builder.select(is_within, group, builder.sub(group, groups))
    found = builder.add(base, builder.mul(group, i64(_GROUP_WEIGHTS)))
    return builder.select(builder.icmp_signed("==", then, i64(0)), then, found)


def _tile_products(
    typing_context: Any, num_chunks: Any, num_rows: Any, left: Any, groups: Any, right: Any, scale: Any, then: Any,
    bias: Any, out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """As in `int8_products`, after `begin_tiles`. `then`: as in `tile_gemm`."""
    chunks = num_chunks.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_rows, left, groups, right, scale, then, bias, out, out_bytes = args
        sums, totals = stack_space(builder, 2 * chunks * _SUM_BYTES), stack_space(builder, chunks * _SUM_BYTES)
        with _row_loop(builder, num_rows) as loop:
            at = builder.add(totals, builder.mul(loop.index, i64(TILE_BYTES)))
            for chunk in range(chunks):
                store(builder, ir.Constant(_VECTOR, [0.0] * LANES), at, chunk * _SUM_BYTES)
        with cgutils.for_range(builder, groups, intp=_I64) as loop:
            at = builder.add(left, builder.mul(builder.mul(loop.index, num_rows), i64(GROUP_BYTES)))
            here = builder.add(right, builder.mul(loop.index, i64(_GROUP_WEIGHTS)))
            ahead = _ahead(builder, loop.index, groups, right, then)
            _multiply_group(builder, chunks, num_rows, at, here, sums, ahead)
            facts = builder.add(at, builder.mul(num_rows, i64(2 * GROUP)))
            scales = builder.add(scale, builder.mul(loop.index, i64(2 * BLOCK)))
            _add_group(builder, chunks, num_rows, facts, scales, sums, totals)
        added = biases(builder, bias, chunks)
        with _row_loop(builder, num_rows) as loop:
            at = builder.add(totals, builder.mul(loop.index, i64(TILE_BYTES)))
            to = builder.add(out, builder.mul(loop.index, out_bytes))
            for chunk, vector in enumerate(added):
                total = builder.fadd(load(builder, at, chunk * _SUM_BYTES), vector)
                store_rounded(builder, total, builder.add(to, i64(2 * LANES * chunk)), 2)
        return context.get_dummy_value()

    return numba.void(num_chunks, *[numba.int64] * 9), generate


_products = cast(Callable[..., None], intrinsic(prefer_literal=True)(_tile_products))


@jit
def takes_tiles(num_rows: int, tiles: int) -> bool:
    return tiles != 0 and num_rows >= _LEAST_ROWS


@jit
def narrow_piece(num_rows: int, x: int, columns: int, piece: int, to: int) -> None:
    first, groups = piece * TILE_ROWS, groups_of(columns)
    count = min(TILE_ROWS, num_rows - first)
    for t in range(count):
        for g in range(groups):
            source = x + 2 * ((first + t) * columns + GROUP * g)
            at = to + (first * groups + count * g) * GROUP_BYTES
            high, low, facts = at + GROUP * t, at + GROUP * (count + t), at + 2 * GROUP * count + 8 * t
            narrow_group(1, source, min(GROUP, columns - GROUP * g), high, low, facts)


@jit
def multiply_narrowed(
    num_rows: int, x: Any, columns: int, weight: Any, scale: Any, outputs: int, piece: int, bias: Any, out: Any,
    out_bytes: int, following: int,
) -> None:  # fmt: skip
    """As `small_gemm.multiply_piece`, of narrowed rows."""
    groups = groups_of(columns)
    at, count = outputs_of(outputs, piece)
    right, scales = weights_of(groups, weight, scale, at)
    then, _ = weights_of(groups, weight, scale, outputs_of(outputs, following)[0])
    if following >= num_pieces(outputs):
        then = right
    bias_at = bias + 2 * at if bias != 0 else bias
    height = 0
    for row in range(0, num_rows, TILE_ROWS):
        left, to = x + row * groups * GROUP_BYTES, out + row * out_bytes
        if height != min(TILE_ROWS, num_rows - row):
            height = min(TILE_ROWS, num_rows - row)
            begin_tiles(height)
        if count < BLOCK:
            _products(2, height, left, groups, right, scales, then, bias_at, to, out_bytes)
        else:
            _products(4, height, left, groups, right, scales, then, bias_at, to, out_bytes)
        then = 0
    end_tiles()


TILES = Int8Path(HAS_INT8_TILES, BLOCK, STEP, SHIFT, narrow_piece, multiply_narrowed)
