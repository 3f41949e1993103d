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
from baton.kernels.cpu.simd import LANES, LINE_BYTES, cgutils, i64, load, prefetch, store
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
# Bytes of the next block that a step fetches at least.
_LEAST_FETCHED = 128
# Rows of a pass: two tiles.
_PASS_ROWS = 2 * TILE_ROWS
# With more steps a pass's rows and weights do not fit into the first cache together.
_CACHED_STEPS = 10
_NOTHING, _ROWS, _WEIGHTS = range(3)
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
        rows = [i64(TILE_ROWS)] * (groups - 1) + [args[1]]
        heights = {tile: rows[group] for (group, _), tile in totals.items()}
        heights |= dict(zip(lefts, rows, strict=True)) | dict.fromkeys(rights, i64(TILE_PAIRS))
        configure(builder, heights)
        return context.get_dummy_value()

    return numba.void(num_groups, numba.int64), generate


def _tile_products(
    typing_context: Any, num_groups: Any, streamed: Any, num_rows: Any, left: Any, row_bytes: Any, right: Any,
    steps: Any, ahead: Any, fetched: Any, bias: Any, out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [num_rows, 32] = sum over `steps` of left [row, step] * right [step], plus bias (0: none).

    After `_begin`. A step fetches `fetched` bytes from `ahead` on. `streamed`, a literal: what the first cache should
    not keep, `_ROWS` or `_WEIGHTS`.
    """
    groups, passing = num_groups.literal_value, streamed.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, num_rows, left, row_bytes, right, steps, ahead, fetched, bias, out, out_bytes = args
        totals, lefts, rights = _places(groups)
        sums = stack_space(builder, groups * TILE_ROWS * _SUM_BYTES)
        for tile in totals.values():
            zero(builder, tile)
        group_bytes = builder.mul(row_bytes, i64(TILE_ROWS))
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            here = builder.add(right, builder.mul(loop.index, i64(_STEP_BYTES)))
            fetches = builder.add(ahead, builder.mul(loop.index, fetched))
            with cgutils.for_range(builder, builder.sdiv(fetched, i64(LINE_BYTES)), intp=_I64) as line:
                prefetch(builder, builder.add(fetches, builder.mul(line.index, i64(LINE_BYTES))), LINE_BYTES)
            at = builder.add(left, builder.mul(loop.index, i64(TILE_BYTES)))
            for tile in lefts:
                load_tile(builder, tile, at, row_bytes, passing == _ROWS)
                at = builder.add(at, group_bytes)
            for chunk, tile in enumerate(rights):
                at = builder.add(here, i64(TILE_BYTES * chunk))
                load_tile(builder, tile, at, i64(_PAIR_BYTES), passing == _WEIGHTS)
            for (group, chunk), total in totals.items():
                add_product(builder, total, lefts[group], rights[chunk])
        for (group, chunk), total in totals.items():
            at = builder.add(sums, i64(group * TILE_ROWS * _SUM_BYTES + TILE_BYTES * chunk))
            store_tile(builder, total, at, i64(_SUM_BYTES))
        _store_rows(builder, num_rows, sums, bias, out, out_bytes)
        return context.get_dummy_value()

    return numba.void(num_groups, streamed, *[numba.int64] * 10), generate


def _store_rows(builder: Any, num_rows: Any, sums: Any, bias: Any, out: Any, out_bytes: Any) -> None:
    added = biases(builder, bias, _CHUNKS)
    with cgutils.for_range(builder, num_rows, intp=_I64) as loop:
        at = builder.add(sums, builder.mul(loop.index, i64(_SUM_BYTES)))
        totals = [builder.fadd(load(builder, at, TILE_BYTES * chunk), vector) for chunk, vector in enumerate(added)]
        store(builder, rounded_pair(builder, *totals), builder.add(out, builder.mul(loop.index, out_bytes)))


_Call = Callable[..., Any]
_begin = cast(_Call, intrinsic(prefer_literal=True)(_begun))
_products = cast(_Call, intrinsic(prefer_literal=True)(_tile_products))


def _passes_of(streamed: int) -> Any:
    """All passes of a product."""

    @jit
    def multiply(
        num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, bias: Any, out: Any, out_bytes: int,
        blocks: int, following: Any,
    ) -> None:  # fmt: skip
        passes = (num_rows + _PASS_ROWS - 1) // _PASS_ROWS
        # Passes share the fetching of the next block, so that memory is read all the time.
        share = max(_LEAST_FETCHED, (_STEP_BYTES // LINE_BYTES + passes - 1) // passes * LINE_BYTES)
        for block in range(blocks):
            weights, y = right + block * steps * _STEP_BYTES, out + block * BLOCK * 2
            bias_at = bias + block * BLOCK * 2 if bias != 0 else bias
            ahead = weights + steps * _STEP_BYTES if block < blocks - 1 else following
            end = ahead + steps * _STEP_BYTES
            for start in range(0, num_rows, _PASS_ROWS):
                count, row = min(num_rows - start, _PASS_ROWS), start
                groups = (count + TILE_ROWS - 1) // TILE_ROWS
                if num_rows >= groups * TILE_ROWS:
                    # Whole tiles: some rows are computed twice.
                    count = groups * TILE_ROWS
                    row = min(start, num_rows - count)
                x, to, fetched = left + row * row_bytes, y + row * out_bytes, share if ahead < end else 0
                if groups > 1:
                    _products(2, streamed, count, x, row_bytes, weights, steps, ahead, fetched, bias_at, to, out_bytes)
                else:
                    _products(1, streamed, count, x, row_bytes, weights, steps, ahead, fetched, bias_at, to, out_bytes)
                ahead += steps * fetched

    return multiply


_multiply, _multiply_streaming_rows, _multiply_streaming_weights = map(_passes_of, (_NOTHING, _ROWS, _WEIGHTS))


@jit
def multiply_tiles(
    num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, bias: Any, out: Any, out_bytes: int, blocks: int,
    following: Any,
) -> None:  # fmt: skip
    """`following`: the block that is read next."""
    if num_rows <= TILE_ROWS:
        _begin(1, num_rows)
    elif num_rows < _PASS_ROWS:
        _begin(2, num_rows - TILE_ROWS)
    else:
        _begin(2, TILE_ROWS)
    if steps <= _CACHED_STEPS:
        _multiply(num_rows, left, row_bytes, right, steps, bias, out, out_bytes, blocks, following)
    elif num_rows > _PASS_ROWS:
        _multiply_streaming_rows(num_rows, left, row_bytes, right, steps, bias, out, out_bytes, blocks, following)
    else:
        _multiply_streaming_weights(num_rows, left, row_bytes, right, steps, bias, out, out_bytes, blocks, following)
    end_tiles()
