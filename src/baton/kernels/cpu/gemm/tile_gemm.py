"""Products of bfloat16 rows and a weight that oneDNN has packed as [N / 32][K / 2][32][2], in tiles (Intel AMX).

TDPBF16PS adds 32 columns at a time, in order, as oneDNN does: the bits are equal.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import jit
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS, store_with_bias
from baton.kernels.cpu.simd import LANES, cgutils, has_features, prefetch

HAS_TILES = HAS_BF16_PAIRS and has_features("amx-tile", "amx-bf16")
# Outputs of a block of weights.
BLOCK = 32
# Columns of a tile, and its rows.
COLUMNS, _ROWS = 32, 16
_TILE_BYTES = 64
_CHUNKS = BLOCK // LANES
# A step is a tile of each chunk, side by side.
_PAIR_BYTES = 4 * BLOCK
_STEP_BYTES = _PAIR_BYTES * COLUMNS // 2
# Steps by which weights are fetched ahead.
_AHEAD = 4
# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


@functools.cache
def may_use_tiles() -> bool:
    """Asks Linux for the permission to use tiles."""
    if not HAS_TILES or platform.system() != "Linux":
        return False
    system_call = ctypes.CDLL(None).syscall
    return bool(
        system_call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_ulong(_REQUEST_PERMISSION), ctypes.c_ulong(_TILE_DATA)) == 0
    )


def _tile_products(
    typing_context: Any, num_groups: Any, first_rows: Any, second_rows: Any, left: Any, row_bytes: Any, right: Any,
    steps: Any, then: Any, bias: Any, out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [first_rows + second_rows, 32] = sum over `steps` of left [row, step] * right [step], plus bias (0: none).

    `num_groups`, a literal, is 2 if there are second rows; first ones are then 16. At `then` (0: nothing is fetched)
    are the weights that are read next.
    """
    groups = range(num_groups.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, *rows, left, row_bytes, right, steps, then, bias, out, out_bytes = args
        sums = cgutils.alloca_once(builder, ir.ArrayType(_I64, len(groups) * _CHUNKS * _ROWS * _TILE_BYTES // 8))
        sums.align = _TILE_BYTES
        sums_at = builder.ptrtoint(sums, _I64)
        places = [(group, chunk) for group in groups for chunk in range(_CHUNKS)]
        totals = {place: number for number, place in enumerate(places)}
        lefts = {group: len(places) + group for group in groups}
        rights = [len(places) + len(groups) + chunk for chunk in range(_CHUNKS)]
        heights = {totals[group, chunk]: rows[group] for group, chunk in places}
        heights |= {lefts[group]: rows[group] for group in groups}
        heights |= {tile: ir.Constant(_I64, COLUMNS // 2) for tile in rights}
        _configure(builder, heights)
        for tile in totals.values():
            _call(builder, "tilezero", _number(tile))
        starts = [
            builder.add(left, builder.mul(row_bytes, ir.Constant(_I64, _ROWS * group))) for group in groups
        ]  # fmt: skip
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            here = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
            column = builder.mul(loop.index, ir.Constant(_I64, _TILE_BYTES))
            with builder.if_then(builder.icmp_signed("!=", then, ir.Constant(_I64, 0))):
                left_over = builder.sub(builder.sub(steps, loop.index), ir.Constant(_I64, _AHEAD))
                after = builder.sub(then, builder.mul(left_over, ir.Constant(_I64, _STEP_BYTES)))
                within = builder.add(here, ir.Constant(_I64, _AHEAD * _STEP_BYTES))
                is_within = builder.icmp_signed(">", left_over, ir.Constant(_I64, 0))
                prefetch(builder, builder.select(is_within, within, after), _STEP_BYTES)
            for group, start in enumerate(starts):
                _move(builder, "tileloadd64", lefts[group], builder.add(start, column), row_bytes)
            for chunk, tile in enumerate(rights):
                at = builder.add(here, ir.Constant(_I64, _TILE_BYTES * chunk))
                _move(builder, "tileloadd64", tile, at, ir.Constant(_I64, _PAIR_BYTES))
            for (group, chunk), total in totals.items():
                _call(builder, "tdpbf16ps", _number(total), _number(lefts[group]), _number(rights[chunk]))
        group_bytes = _CHUNKS * _ROWS * _TILE_BYTES
        for (group, chunk), total in totals.items():
            at = builder.add(sums_at, ir.Constant(_I64, group * group_bytes + _TILE_BYTES * chunk))
            _move(builder, "tilestored64", total, at, ir.Constant(_I64, _CHUNKS * _TILE_BYTES))
        _call(builder, "tilerelease")
        for group in groups:
            with cgutils.for_range(builder, rows[group], intp=_I64) as loop:
                at = builder.add(sums_at, builder.mul(loop.index, ir.Constant(_I64, _CHUNKS * _TILE_BYTES)))
                at = builder.add(at, ir.Constant(_I64, group * group_bytes))
                row = {
                    (0, chunk): builder.inttoptr(
                        builder.add(at, ir.Constant(_I64, _TILE_BYTES * chunk)), _VECTOR.as_pointer()
                    )
                    for chunk in range(_CHUNKS)
                }
                number = builder.add(loop.index, ir.Constant(_I64, _ROWS * group))
                store_with_bias(builder, row, bias, builder.add(out, builder.mul(number, out_bytes)), out_bytes)
        return context.get_dummy_value()

    return numba.void(num_groups, *[numba.int64] * 10), generate


def _configure(builder: Any, heights: dict[int, Any]) -> None:
    """Tiles of 64 bytes a row."""
    config = cgutils.alloca_once(builder, ir.ArrayType(_I64, 8))
    config.align = _TILE_BYTES
    widths, rows = [0, 0], ir.Constant(_I64, 0)
    for tile, height in heights.items():
        widths[tile // 4] |= _TILE_BYTES << (16 * (tile % 4))
        rows = builder.or_(rows, builder.shl(height, ir.Constant(_I64, 8 * tile)))
    words = [ir.Constant(_I64, word) for word in (1, 0, *widths, 0, 0)]
    for place, word in enumerate([*words, rows, ir.Constant(_I64, 0)]):
        builder.store(word, builder.gep(config, [ir.Constant(_I64, 0), ir.Constant(_I64, place)]))
    _call(builder, "ldtilecfg", builder.bitcast(config, _I8.as_pointer()))


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


def _move(builder: Any, name: str, tile: int, at: Any, stride: Any) -> None:
    _call(builder, name, _number(tile), builder.inttoptr(at, _I8.as_pointer()), stride)


def _call(builder: Any, name: str, *args: Any) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


_products = cast(Callable[..., Any], intrinsic(prefer_literal=True)(_tile_products))


@jit
def multiply_tiles(
    num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, bias: Any, out: Any, out_bytes: int, blocks: int,
    following: Any,
) -> None:  # fmt: skip
    """The first pass also fetches weights ahead, at last those at `following`."""
    for block in range(blocks):
        weights, y = right + block * steps * _STEP_BYTES, out + block * BLOCK * 2
        bias_at = bias + block * BLOCK * 2 if bias != 0 else bias
        then = weights + steps * _STEP_BYTES if block < blocks - 1 else following
        row = 0
        while row < num_rows:
            count = min(num_rows - row, 2 * _ROWS)
            x, to = left + row * row_bytes, y + row * out_bytes
            if count > _ROWS:
                _products(2, _ROWS, count - _ROWS, x, row_bytes, weights, steps, then, bias_at, to, out_bytes)
            else:
                _products(1, count, 0, x, row_bytes, weights, steps, then, bias_at, to, out_bytes)
            then, row = weights - weights, row + count
