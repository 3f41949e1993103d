"""Products with int8 weights by AVX2's VPMADDWD: pairs of columns, in 16 bits."""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from baton.jit_cache import jit
from baton.kernels.cpu.gemm.int8_products import Int8Path, Sums, products_of
from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, groups_of, narrow_rows
from baton.kernels.cpu.gemm.small_gemm import outputs_of
from baton.kernels.cpu.simd import LANES, cgutils, has_features, load, prefetch

# Sums of 6 rows fill 12 of 16 registers.
_PANEL = LANES
_PAIR = 2
_STEP_BYTES = _PAIR * _PANEL
_LINE, _AHEAD = 64, 1024
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_HALF = LANES // 2
_BYTES, _PAIRS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)
_WORDS = ir.VectorType(_I32, _HALF)


def _splat(builder: Any, word: Any) -> Any:
    one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * _HALF))


def _group_sums(builder: Any, chunks: int, starts: list[Any], weights: Any) -> Sums:
    function_type = ir.FunctionType(_WORDS, [_PAIRS] * 2)
    multiply = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx2.pmadd.wd")
    sums = [[cgutils.alloca_once(builder, _WORDS) for _ in range(2)] for _ in starts]
    for total in itertools.chain(*sums):
        builder.store(ir.Constant(_WORDS, [0] * _HALF), total)
    with cgutils.for_range(builder, ir.Constant(_I64, GROUP * _PANEL // _LINE), intp=_I64) as loop:
        here = builder.add(weights, builder.mul(loop.index, ir.Constant(_I64, _LINE)))
        offset = builder.mul(loop.index, ir.Constant(_I64, 2 * _LINE // _PANEL))
        for step in range(_LINE // _STEP_BYTES):
            vectors = [
                builder.sext(load(builder, here, _STEP_BYTES * step + LANES * half, _BYTES), _PAIRS)
                for half in range(2)
            ]
            for start, totals in zip(starts, sums, strict=True):
                word = load(builder, builder.add(start, offset), 2 * _PAIR * step, _I32)
                pair = builder.bitcast(_splat(builder, word), _PAIRS)
                for vector, total in zip(vectors, totals, strict=True):
                    product = builder.call(multiply, [vector, pair])
                    builder.store(builder.add(builder.load(total), product), total)
        if len(starts) <= 2:
            prefetch(builder, builder.add(here, ir.Constant(_I64, _AHEAD)), _LINE)
    lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return {
        (row, 0): builder.shuffle_vector(builder.load(low), builder.load(high), lanes)
        for row, (low, high) in enumerate(sums)
    }


_products = products_of(_group_sums, _PANEL)


@jit
def _panel(num_rows: int, left: Any, groups: int, right: Any, scale: Any, bias: Any, out: Any, out_bytes: int) -> None:
    row = 0
    while row < num_rows:
        x, y, more = left + row * groups * GROUP_BYTES, out + row * out_bytes, num_rows - row
        if more >= 6:
            _products(6, 1, x, groups, right, scale, bias, y, out_bytes)
            row += 6
        elif more >= 4:
            _products(4, 1, x, groups, right, scale, bias, y, out_bytes)
            row += 4
        elif more >= 2:
            _products(2, 1, x, groups, right, scale, bias, y, out_bytes)
            row += 2
        else:
            _products(1, 1, x, groups, right, scale, bias, y, out_bytes)
            row += 1


@jit
def narrow_piece(num_rows: int, x: int, columns: int, piece: int, to: int) -> None:
    narrow_rows(num_rows, x, columns, piece, to, False)


@jit
def multiply_narrowed(
    num_rows: int, x: Any, columns: int, weight: Any, scale: Any, outputs: int, piece: int, bias: Any, out: Any,
    out_bytes: int, following: int,
) -> None:  # fmt: skip
    """As `small_gemm.multiply_piece`, of narrowed rows."""
    groups = groups_of(columns)
    first, count = outputs_of(outputs, piece)
    for at in range(first, first + count, _PANEL):
        right, scales = weight + at * groups * GROUP, scale + 2 * at * groups
        bias_at = bias + 2 * at if bias != 0 else bias
        _panel(num_rows, x, groups, right, scales, bias_at, out + 2 * (at - first), out_bytes)


AVX2 = Int8Path(has_features("avx2", "fma"), _PANEL, _PAIR, 0, narrow_piece, multiply_narrowed)
