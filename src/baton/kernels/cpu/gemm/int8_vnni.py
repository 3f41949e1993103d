"""Products with int8 weights by AVX-512's VPDPBUSD: four columns, of rows' high bytes and low ones."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from baton.jit_cache import jit
from baton.kernels.cpu.gemm.int8_products import Int8Path, Sums, products_of
from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, SUM_AT, groups_of, narrow_rows
from baton.kernels.cpu.gemm.small_gemm import outputs_of
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, has_features, load, prefetch, splat

BLOCK = CHUNKS * LANES
STEP = 4
_STEP_BYTES = STEP * BLOCK
# Makes weights unsigned.
SHIFT = 128
_AHEAD = 1024
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORDS = ir.VectorType(_I32, LANES)


def _add_steps(builder: Any, parts: dict[int, Sums], starts: list[Any], weights: Any, ahead: int) -> None:
    """`parts`: sums by the offset of rows' bytes."""
    one = next(iter(parts.values()))
    chunks = len(one) // len(starts)
    function_type = ir.FunctionType(_WORDS, [_WORDS] * 3)
    dot = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512.vpdpbusd.512")
    with cgutils.for_range(builder, ir.Constant(_I64, GROUP // STEP), intp=_I64) as loop:
        here = builder.add(weights, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
        vectors = [load(builder, here, 4 * LANES * chunk, _WORDS) for chunk in range(chunks)]
        offset = builder.mul(loop.index, ir.Constant(_I64, STEP))
        for row, start in enumerate(starts):
            for part, sums in parts.items():
                four = splat(builder, load(builder, builder.add(start, offset), part, _I32))
                for chunk, vector in enumerate(vectors):
                    total = builder.load(sums[row, chunk])
                    builder.store(builder.call(dot, [total, vector, four]), sums[row, chunk])
        if ahead:
            prefetch(builder, builder.add(here, ir.Constant(_I64, ahead)), 4 * LANES * chunks)


def _group_sums(builder: Any, chunks: int, starts: list[Any], weights: Any) -> Sums:
    """More rows read weights twice, for half the sums."""
    places = [(row, chunk) for row in range(len(starts)) for chunk in range(chunks)]
    sums = [{place: cgutils.alloca_once(builder, _WORDS) for place in places} for _ in range(2)]
    for place in places:
        builder.store(splat(builder, load(builder, starts[place[0]], SUM_AT, _I32)), sums[0][place])
        builder.store(ir.Constant(_WORDS, [0] * LANES), sums[1][place])
    seven = splat(builder, ir.Constant(_I32, 7))
    high, low = 0, GROUP
    if len(starts) <= 2:
        _add_steps(builder, {high: sums[0], low: sums[1]}, starts, weights, _AHEAD)
        return {
            place: builder.add(builder.shl(builder.load(total), seven), builder.load(sums[1][place]))
            for place, total in sums[0].items()
        }
    _add_steps(builder, {high: sums[0]}, starts, weights, 0)
    for total in sums[0].values():
        builder.store(builder.shl(builder.load(total), seven), total)
    _add_steps(builder, {low: sums[0]}, starts, weights, GROUP * BLOCK)
    return {place: builder.load(total) for place, total in sums[0].items()}


_products = products_of(_group_sums, BLOCK)


@jit
def _block(
    num_rows: int, left: Any, groups: int, right: Any, scale: Any, bias: Any, out: Any, out_bytes: int, is_half: bool
) -> None:
    row = 0
    while row < num_rows:
        x, y, more = left + row * groups * GROUP_BYTES, out + row * out_bytes, num_rows - row
        if is_half:
            if more >= 4:
                _products(4, 2, x, groups, right, scale, bias, y, out_bytes)
                row += 4
            else:
                _products(1, 2, x, groups, right, scale, bias, y, out_bytes)
                row += 1
        elif more >= 6:
            _products(6, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 6
        elif more >= 4:
            _products(4, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 4
        elif more >= 2:
            _products(2, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 2
        else:
            _products(1, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 1


@jit
def narrow_piece(num_rows: int, x: int, columns: int, piece: int, to: int) -> None:
    narrow_rows(num_rows, x, columns, piece, to, True)


@jit
def weights_of(groups: int, weight: Any, scale: Any, at: int) -> tuple[Any, Any]:
    """Those of output `at`, and their scales."""
    block, rest = at // BLOCK * groups, at % BLOCK
    return weight + block * GROUP * BLOCK + STEP * rest, scale + 2 * (block * BLOCK + rest)


@jit
def multiply_narrowed(
    num_rows: int, x: Any, columns: int, weight: Any, scale: Any, outputs: int, piece: int, bias: Any, out: Any,
    out_bytes: int, following: int,
) -> None:  # fmt: skip
    """As `small_gemm.multiply_piece`, of narrowed rows."""
    groups = groups_of(columns)
    at, count = outputs_of(outputs, piece)
    right, scales = weights_of(groups, weight, scale, at)
    bias_at = bias + 2 * at if bias != 0 else bias
    _block(num_rows, x, groups, right, scales, bias_at, out, out_bytes, count < BLOCK)


VNNI = Int8Path(has_features("avx512f", "avx512vnni"), BLOCK, STEP, SHIFT, narrow_piece, multiply_narrowed)
