"""Rows of bfloat16 as whole numbers of 15 bits (in 16, or 128 * high + low bytes), in groups of columns.

Each is a multiple of 2^-13 of the power of two below its group's largest magnitude. From 1/64 of it on they are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import jit
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, folded, load, load_widened, splat, store
from baton.kernels.cpu.tiles import TILE_ROWS

GROUP = CHUNKS * LANES
# Rows of a piece of work.
_ROWS_AT_ONCE = TILE_ROWS
# Offsets after a group's numbers: its scale in float32, and minus their sum in int32.
SCALE_AT = 2 * GROUP
SUM_AT = SCALE_AT + 4
GROUP_BYTES = SUM_AT + 4
# The least exponent whose factor is a normal number, and bits of bfloat16 and float32.
_LEAST_EXPONENT, _INFINITE, _NAN = 14, 0xFF, 0x7FC00000
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES, _WORDS = ir.VectorType(_I8, LANES), ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _words(builder: Any, number: int) -> Any:
    return splat(builder, ir.Constant(_I32, number))


def _float(builder: Any, exponent: Any) -> Any:
    return builder.bitcast(builder.shl(exponent, ir.Constant(_I32, 23)), ir.FloatType())


def _larger(builder: Any, a: Any, b: Any, order: str = ">") -> Any:
    return builder.select(builder.icmp_signed(order, a, b), a, b)


def _store_bytes(builder: Any, number: Any, high_at: Any, low_at: Any, offset: int) -> None:
    high = builder.ashr(builder.add(number, _words(builder, 64)), _words(builder, 7))
    high = _larger(builder, high, _words(builder, 127), "<")
    low = builder.sub(number, builder.shl(high, _words(builder, 7)))
    store(builder, builder.trunc(high, _BYTES), high_at, offset)
    store(builder, builder.trunc(low, _BYTES), low_at, offset)


def _whole_group(builder: Any, source: Any, columns: Any) -> Any:
    """64 bfloat16: missing columns are zeros."""
    padded = cgutils.alloca_once(builder, _SHORTS, CHUNKS)
    at = builder.ptrtoint(padded, _I64)
    is_short = builder.icmp_signed("<", columns, ir.Constant(_I64, GROUP))
    with builder.if_then(is_short, likely=False):
        for i in range(CHUNKS):
            store(builder, ir.Constant(_SHORTS, [0] * LANES), at, 2 * LANES * i)
        with cgutils.for_range(builder, columns, intp=_I64) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, 2))
            store(builder, load(builder, source, offset, ir.IntType(16)), at, offset)
    return builder.select(is_short, at, source)


def _narrowed(typing_context: Any, in_bytes: Any, source: Any, columns: Any, high: Any, low: Any, scale: Any) -> Any:
    """Narrow `columns` bfloat16. If one is not finite, the scale is NaN. Minus their sum follows it.

    `in_bytes`: a literal; 0: 16 bits at `high`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, columns, high, low, scale_at = args
        source = _whole_group(builder, source, columns)
        wide = [load_widened(builder, builder.add(source, ir.Constant(_I64, 32 * i)), 2) for i in range(CHUNKS)]
        peak = _words(builder, 0)
        for vector in wide:
            peak = _larger(builder, peak, builder.and_(builder.bitcast(vector, _WORDS), _words(builder, 0x7FFFFFFF)))
        exponent = builder.lshr(folded(builder, peak, _larger), ir.Constant(_I32, 23))
        is_finite = builder.icmp_signed("<", exponent, ir.Constant(_I32, _INFINITE))
        exponent = _larger(builder, exponent, ir.Constant(_I32, _LEAST_EXPONENT))
        factor = splat(builder, _float(builder, builder.sub(ir.Constant(_I32, 2 * 127 + 13), exponent)))
        # Rounds in low bits.
        magic = splat(builder, ir.Constant(ir.FloatType(), 12582912.0))
        total = _words(builder, 0)
        for i, vector in enumerate(wide):
            shifted = builder.bitcast(builder.fadd(builder.fmul(vector, factor), magic), _WORDS)
            number = builder.sub(shifted, builder.bitcast(magic, _WORDS))
            if in_bytes.literal_value:
                _store_bytes(builder, number, high, low, LANES * i)
            else:
                store(builder, builder.trunc(number, _SHORTS), high, 2 * LANES * i)
            total = builder.sub(total, number)
        scale = _float(builder, builder.sub(exponent, ir.Constant(_I32, 13)))
        nan = builder.bitcast(ir.Constant(_I32, _NAN), ir.FloatType())
        store(builder, builder.select(is_finite, scale, nan), scale_at)
        total = folded(builder, total, lambda builder, a, b: builder.add(a, b))
        store(builder, total, scale_at, SUM_AT - SCALE_AT)
        return context.get_dummy_value()

    return numba.void(in_bytes, *[numba.int64] * 5), generate


narrow_group = cast(Callable[..., None], intrinsic(prefer_literal=True)(_narrowed))


@jit
def groups_of(columns: int) -> int:
    return (columns + GROUP - 1) // GROUP


@jit
def _narrow_row(x: int, columns: int, to: int, in_bytes: bool) -> None:
    for g in range(groups_of(columns)):
        source, rest, at = x + 2 * GROUP * g, min(GROUP, columns - GROUP * g), to + GROUP_BYTES * g
        if in_bytes:
            narrow_group(1, source, rest, at, at + GROUP, at + SCALE_AT)
        else:
            narrow_group(0, source, rest, at, at, at + SCALE_AT)


@jit
def num_narrow_pieces(num_rows: int) -> int:
    return (num_rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE


@jit
def narrow_rows(num_rows: int, x: int, columns: int, piece: int, to: int, in_bytes: bool) -> None:
    """A piece of x [T, K]."""
    row_bytes = groups_of(columns) * GROUP_BYTES
    for t in range(piece * _ROWS_AT_ONCE, min((piece + 1) * _ROWS_AT_ONCE, num_rows)):
        _narrow_row(x + 2 * columns * t, columns, to + row_bytes * t, in_bytes)
