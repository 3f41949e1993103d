"""Blocks of outputs, in passes of about as many rows each: at most as many as registers can hold sums of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.kernels.cpu.bf16_dot import store_with_bias
from baton.kernels.cpu.jit_cache import jit
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils

# Outputs.
_BLOCK = CHUNKS * LANES
_MOST_ROWS = 6
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
# By row and chunk of 16 outputs.
Sums = dict[tuple[int, int], Any]
# (builder, sums, rows' addresses, weights, what to fetch, steps, `more`): generates additions to the sums.
Add = Callable[[Any, Sums, list[Any], Any, Any, Any, Any], None]


@jit
def num_pieces(outputs: int) -> int:
    """The last of an odd number of blocks is two pieces, so that two threads finish together."""
    return outputs // _BLOCK + outputs // _BLOCK % 2


@jit
def outputs_of(outputs: int, piece: int) -> tuple[int, int]:
    """A piece's first output, and how many there are."""
    whole = outputs // _BLOCK // 2 * 2
    if piece < whole:
        return piece * _BLOCK, _BLOCK
    half = _BLOCK // 2
    return whole * _BLOCK + (piece - whole) * half, half


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _align_stack(builder: Any) -> None:
    """Without such a variable LLVM spills vectors across cache lines."""
    variable = cgutils.alloca_once(builder, _VECTOR)
    variable.align = 4 * LANES
    builder.asm(ir.FunctionType(ir.VoidType(), [variable.type]), "", "r", [variable], side_effect=True)


def in_passes(
    add: Add, row_bytes: int, weight_bytes: int, ahead: Callable[[int], int], shares: int
) -> Callable[..., None]:
    """`row_bytes` and `weight_bytes` are of a step.

    The first pass fetches what is so many bytes `ahead`, the next `shares` the block at `following`, others their next
    step.
    """

    def block_products(
        typing_context: Any, num_chunks: Any, num_rows: Any, left: Any, steps: Any, right: Any, more: Any, bias: Any,
        out: Any, out_bytes: Any, following: Any,
    ) -> Any:  # fmt: skip
        """out [num_rows, 16 * num_chunks] = left * right, plus bias (0: none), over `steps` in order.

        Addresses; `bias` and `out` are bfloat16. `num_chunks` is a literal.
        """
        chunks = range(num_chunks.literal_value)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, num_rows, left, steps, right, more, bias, out, out_bytes, following = args
            _align_stack(builder)
            left_bytes = builder.mul(steps, _number(row_bytes))
            share = builder.mul(steps, _number(weight_bytes // shares))
            full = builder.sdiv(builder.sub(num_rows, _number(1)), _number(_MOST_ROWS))
            passes = builder.add(full, _number(1))
            fewest = builder.sdiv(num_rows, passes)
            larger = builder.sub(num_rows, builder.mul(fewest, passes))
            with cgutils.for_range(builder, passes, intp=_I64) as loop:
                is_larger = builder.icmp_signed("<", loop.index, larger)
                count = builder.add(fewest, builder.zext(is_larger, _I64))
                first = builder.add(builder.mul(fewest, loop.index), builder.select(is_larger, loop.index, larger))
                x = builder.add(left, builder.mul(left_bytes, first))
                y = builder.add(out, builder.mul(out_bytes, first))
                is_first = builder.icmp_signed("==", loop.index, _number(0))
                before = builder.sub(loop.index, _number(1))
                fetches = builder.icmp_unsigned("<", before, _number(shares))
                part = builder.add(following, builder.mul(share, before))
                for rows in range(1, _MOST_ROWS + 1):
                    with builder.if_then(builder.icmp_signed("==", count, _number(rows))):
                        places = itertools.product(range(rows), chunks)
                        sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
                        for one in sums.values():
                            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), one)
                        starts = [builder.add(x, builder.mul(left_bytes, _number(row))) for row in range(rows)]
                        near = builder.select(is_first, _number(ahead(rows)), _number(weight_bytes))
                        fetched = builder.select(fetches, part, builder.add(right, near))
                        add(builder, sums, starts, right, fetched, steps, more)
                        store_with_bias(builder, sums, bias, y, out_bytes)
            return context.get_dummy_value()

        return numba.void(num_chunks, *[numba.int64] * 9), generate

    return cast(Callable[..., None], intrinsic(prefer_literal=True)(block_products))
