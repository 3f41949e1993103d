"""Products of bfloat16 rows and a weight that oneDNN has packed as [N / 32][K / 2][32][2], in tiles (Intel AMX).

TDPBF16PS adds 32 columns at a time, in order, as oneDNN does: the bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import jit
from baton.kernels.cpu.bf16_dot import rounded_pair
from baton.kernels.cpu.simd import LANES, cgutils, load, prefetch, store
from baton.kernels.cpu.tiles import (
    TILE_BYTES,
    TILE_PAIRS,
    TILE_ROWS,
    add_product,
    biases,
    configure,
    end_tiles,
    load_tile,
    stack_space,
    store_tile,
    zero,
)

# Outputs of a block of weights.
BLOCK = 32
_CHUNKS = BLOCK // LANES
_SUM_BYTES = 4 * BLOCK
# A step is a tile of each chunk, side by side.
_PAIR_BYTES = 4 * BLOCK
_STEP_BYTES = _PAIR_BYTES * TILE_PAIRS
# Steps by which weights are fetched ahead.
_AHEAD = 4
_I64 = ir.IntType(64)


def _places(groups: int) -> tuple[dict[tuple[int, int], int], list[int], list[int]]:
    """The tiles of sums by (group of rows, chunk), of each group's rows, and of each chunk's weights."""
    totals = {(group, chunk): group * _CHUNKS + chunk for group in range(groups) for chunk in range(_CHUNKS)}
    first = len(totals)
    return totals, list(range(first, first + groups)), list(range(first + groups, first + groups + _CHUNKS))


def _begun(typing_context: Any, num_groups: Any, last_rows: Any) -> Any:
    """`num_groups`, a literal: of 16 rows, but `last_rows` in the last."""
    groups = num_groups.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, lefts, rights = _places(groups)
        rows = [ir.Constant(_I64, TILE_ROWS)] * (groups - 1) + [args[1]]
        heights = {tile: rows[group] for (group, _), tile in totals.items()}
        heights |= dict(zip(lefts, rows, strict=True)) | dict.fromkeys(rights, ir.Constant(_I64, TILE_PAIRS))
        configure(builder, heights)
        return context.get_dummy_value()

    return numba.void(num_groups, numba.int64), generate


def _tile_products(
    typing_context: Any, num_groups: Any, num_rows: Any, left: Any, row_bytes: Any, right: Any, steps: Any, then: Any,
    bias: Any, out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [num_rows, 32] = sum over `steps` of left [row, step] * right [step], plus bias (0: none).

    After `_begin`. At `then` (0: nothing is fetched) are the weights that are read next.
    """
    groups = num_groups.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_rows, left, row_bytes, right, steps, then, bias, out, out_bytes = args
        totals, lefts, rights = _places(groups)
        sums = stack_space(builder, groups * TILE_ROWS * _SUM_BYTES)
        for tile in totals.values():
            zero(builder, tile)
        group_bytes = builder.mul(row_bytes, ir.Constant(_I64, TILE_ROWS))
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            here = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
            with builder.if_then(builder.icmp_signed("!=", then, ir.Constant(_I64, 0))):
                left_over = builder.sub(builder.sub(steps, loop.index), ir.Constant(_I64, _AHEAD))
                after = builder.sub(then, builder.mul(left_over, ir.Constant(_I64, _STEP_BYTES)))
                within = builder.add(here, ir.Constant(_I64, _AHEAD * _STEP_BYTES))
                is_within = builder.icmp_signed(">", left_over, ir.Constant(_I64, 0))
                prefetch(builder, builder.select(is_within, within, after), _STEP_BYTES)
            at = builder.add(left, builder.mul(loop.index, ir.Constant(_I64, TILE_BYTES)))
            for tile in lefts:
                load_tile(builder, tile, at, row_bytes)
                at = builder.add(at, group_bytes)
            for chunk, tile in enumerate(rights):
                at = builder.add(here, ir.Constant(_I64, TILE_BYTES * chunk))
                load_tile(builder, tile, at, ir.Constant(_I64, _PAIR_BYTES))
            for (group, chunk), total in totals.items():
                add_product(builder, total, lefts[group], rights[chunk])
        for (group, chunk), total in totals.items():
            at = builder.add(sums, ir.Constant(_I64, group * TILE_ROWS * _SUM_BYTES + TILE_BYTES * chunk))
            store_tile(builder, total, at, ir.Constant(_I64, _SUM_BYTES))
        _store_rows(builder, num_rows, sums, bias, out, out_bytes)
        return context.get_dummy_value()

    return numba.void(num_groups, *[numba.int64] * 9), generate


def _store_rows(builder: Any, num_rows: Any, sums: Any, bias: Any, out: Any, out_bytes: Any) -> None:
    added = biases(builder, bias, _CHUNKS)
    with cgutils.for_range(builder, num_rows, intp=_I64) as loop:
        at = builder.add(sums, builder.mul(loop.index, ir.Constant(_I64, _SUM_BYTES)))
        totals = [builder.fadd(load(builder, at, TILE_BYTES * chunk), vector) for chunk, vector in enumerate(added)]
        store(builder, rounded_pair(builder, *totals), builder.add(out, builder.mul(loop.index, out_bytes)))


_Call = Callable[..., Any]
_begin = cast(_Call, intrinsic(prefer_literal=True)(_begun))
_products = cast(_Call, intrinsic(prefer_literal=True)(_tile_products))


@jit
def _multiply_rows(
    first: int, stop: int, left: Any, row_bytes: int, right: Any, steps: int, bias: Any, out: Any, out_bytes: int,
    blocks: int, following: Any,
) -> None:  # fmt: skip
    for block in range(blocks):
        weights, y = right + block * steps * _STEP_BYTES, out + block * BLOCK * 2
        bias_at = bias + block * BLOCK * 2 if bias != 0 else bias
        for row in range(first, stop, 2 * TILE_ROWS):
            then = 0
            if row == 0:
                then = weights + steps * _STEP_BYTES if block < blocks - 1 else following
            count, x, to = min(stop - row, 2 * TILE_ROWS), left + row * row_bytes, y + row * out_bytes
            if count > TILE_ROWS:
                _products(2, count, x, row_bytes, weights, steps, then, bias_at, to, out_bytes)
            else:
                _products(1, count, x, row_bytes, weights, steps, then, bias_at, to, out_bytes)


@jit
def multiply_tiles(
    num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, bias: Any, out: Any, out_bytes: int, blocks: int,
    following: Any,
) -> None:  # fmt: skip
    """The first pass also fetches weights ahead, at last those at `following`."""
    last = num_rows % (2 * TILE_ROWS)
    whole = num_rows - last
    if whole > 0:
        _begin(2, TILE_ROWS)
        _multiply_rows(0, whole, left, row_bytes, right, steps, bias, out, out_bytes, blocks, following)
    if last > 0:
        if last > TILE_ROWS:
            _begin(2, last - TILE_ROWS)
        else:
            _begin(1, last)
        _multiply_rows(whole, num_rows, left, row_bytes, right, steps, bias, out, out_bytes, blocks, following)
    end_tiles()
