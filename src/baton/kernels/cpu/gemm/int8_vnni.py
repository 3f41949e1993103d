"""Products with int8 weights by AVX-512's VPDPBUSD: four columns, of rows' high bytes and low ones."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from baton.kernels.cpu.gemm.int8_products import Int8Path, products_of
from baton.kernels.cpu.gemm.int8_rows import GROUP, SUM_AT, groups_of, narrow_rows
from baton.kernels.cpu.gemm.passes import Sums, num_pieces, outputs_of
from baton.kernels.cpu.jit_cache import jit
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, has_features, load, prefetch, splat

_BLOCK, _HALF = CHUNKS * LANES, CHUNKS // 2
_STEP = 4
_STEP_BYTES = _STEP * _BLOCK
# Makes weights unsigned.
_SHIFT = 128
# Rows whose sums of both bytes registers can hold.
_AT_ONCE = 3
# Bytes.
_AHEAD = 1024
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORDS = ir.VectorType(_I32, LANES)


def _add_steps(builder: Any, parts: dict[int, Sums], starts: list[Any], weights: Any, fetched: Any) -> None:
    """`parts`: sums by the offset of rows' bytes."""
    one = next(iter(parts.values()))
    chunks = len(one) // len(starts)
    function_type = ir.FunctionType(_WORDS, [_WORDS] * 3)
    dot = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512.vpdpbusd.512")
    with cgutils.for_range(builder, ir.Constant(_I64, GROUP // _STEP), intp=_I64) as loop:
        here = builder.add(weights, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
        vectors = [load(builder, here, 4 * LANES * chunk, _WORDS) for chunk in range(chunks)]
        offset = builder.mul(loop.index, ir.Constant(_I64, _STEP))
        for row, start in enumerate(starts):
            for part, sums in parts.items():
                four = splat(builder, load(builder, builder.add(start, offset), part, _I32))
                for chunk, vector in enumerate(vectors):
                    total = builder.load(sums[row, chunk])
                    builder.store(builder.call(dot, [total, vector, four]), sums[row, chunk])
        if fetched is not None:
            there = builder.add(fetched, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
            prefetch(builder, there, 4 * LANES * chunks)


def _group_sums(builder: Any, chunks: int, starts: list[Any], weights: Any, fetched: Any) -> Sums:
    """More rows read weights twice, for half the sums."""
    places = [(row, chunk) for row in range(len(starts)) for chunk in range(chunks)]
    sums = [{place: cgutils.alloca_once(builder, _WORDS) for place in places} for _ in range(2)]
    for place in places:
        builder.store(splat(builder, load(builder, starts[place[0]], SUM_AT, _I32)), sums[0][place])
        builder.store(ir.Constant(_WORDS, [0] * LANES), sums[1][place])
    seven = splat(builder, ir.Constant(_I32, 7))
    high, low = 0, GROUP
    if len(starts) <= _AT_ONCE:
        _add_steps(builder, {high: sums[0], low: sums[1]}, starts, weights, fetched)
        return {
            place: builder.add(builder.shl(builder.load(total), seven), builder.load(sums[1][place]))
            for place, total in sums[0].items()
        }
    _add_steps(builder, {high: sums[0]}, starts, weights, None)
    for total in sums[0].values():
        builder.store(builder.shl(builder.load(total), seven), total)
    _add_steps(builder, {low: sums[0]}, starts, weights, fetched)
    return {place: builder.load(total) for place, total in sums[0].items()}


_products = products_of(_group_sums, _BLOCK, lambda rows: _AHEAD if rows <= _AT_ONCE else 2 * GROUP * _BLOCK)


@jit
def narrow_piece(num_rows: int, x: int, columns: int, piece: int, to: int) -> None:
    narrow_rows(num_rows, x, columns, piece, to, True)


@jit
def multiply_narrowed(
    num_rows: int, x: Any, columns: int, weight: Any, scale: Any, outputs: int, piece: int, bias: Any, out: Any,
    out_bytes: int, following: int,
) -> None:  # fmt: skip
    """As `small_gemm.multiply_piece`, of narrowed rows."""
    groups = groups_of(columns)
    at, count = outputs_of(outputs, piece)
    block, rest = at // _BLOCK * groups, at % _BLOCK
    right, scales = weight + block * GROUP * _BLOCK + _STEP * rest, scale + 2 * (block * _BLOCK + rest)
    bias_at = bias + 2 * at if bias != 0 else bias
    then = right
    if following < num_pieces(outputs):
        then = weight + outputs_of(outputs, following)[0] // _BLOCK * groups * GROUP * _BLOCK
    if count < _BLOCK:
        _products(_HALF, num_rows, x, groups, right, scales, bias_at, out, out_bytes, then)
    else:
        _products(CHUNKS, num_rows, x, groups, right, scales, bias_at, out, out_bytes, then)


VNNI = Int8Path(has_features("avx512f", "avx512vnni"), _BLOCK, _STEP, _SHIFT, narrow_piece, multiply_narrowed)
