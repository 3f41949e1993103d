"""Dot products of bfloat16 pairs (AVX-512 VDPBF16PS): half the instructions of float32, and half the bytes per key.

Products are exact; sums are float32, rounded after each product, in order of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import config as untyped_config
from numba.extending import intrinsic

from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, load, load_widened, splat, store_rounded

_config: Any = untyped_config
HAS_BF16_PAIRS = not _config.CPU_NAME and bool(binding.get_host_cpu_features().get("avx512bf16"))
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BF16_PAIRS = ir.VectorType(BFloat(), 2 * LANES)


def add_products(builder: Any, sums: dict[tuple[int, int], Any], starts: Sequence[Any], right: Any, step: Any) -> None:
    """Generate one step: add left [row, pair `step`] * right [pair `step`] to the `sums` of (row, chunk of 16).

    `starts`: the addresses of the rows of the left. `right` is [pairs, 64, 2]; its first chunks are read.
    """
    chunks = range(len(sums) // len(starts))
    here = builder.add(right, builder.mul(step, ir.Constant(_I64, 4 * LANES * CHUNKS)))
    vectors = [builder.bitcast(load(builder, here, 4 * LANES * chunk), BF16_PAIRS) for chunk in chunks]
    add_loaded_products(builder, sums, starts, vectors, step)


def add_loaded_products(
    builder: Any, sums: dict[tuple[int, int], Any], starts: Sequence[Any], vectors: Sequence[Any], step: Any
) -> None:
    """`vectors`: the 16 pairs of each chunk of the right."""
    function_type = ir.FunctionType(_VECTOR, [_VECTOR, BF16_PAIRS, BF16_PAIRS])
    dot = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512bf16.dpbf16ps.512")
    offset = builder.mul(step, ir.Constant(_I64, 4))
    for row, start in enumerate(starts):
        pair = builder.bitcast(splat(builder, load(builder, start, offset, _I32)), BF16_PAIRS)
        for chunk, vector in enumerate(vectors):
            total = builder.load(sums[row, chunk])
            builder.store(builder.call(dot, [total, vector, pair]), sums[row, chunk])


def store_with_bias(builder: Any, sums: dict[tuple[int, int], Any], bias: Any, out: Any, out_bytes: Any) -> None:
    """Store the `sums` of (row, chunk of 16), plus `bias` (0: none), as bfloat16 rows at `out`, `out_bytes` apart."""
    with builder.if_then(builder.icmp_signed("!=", bias, ir.Constant(_I64, 0))):
        for (_, chunk), total in sums.items():
            added = load_widened(builder, builder.add(bias, ir.Constant(_I64, 2 * LANES * chunk)), 2)
            builder.store(builder.fadd(builder.load(total), added), total)
    for (row, chunk), total in sums.items():
        at = builder.add(out, builder.mul(out_bytes, ir.Constant(_I64, row)))
        store_rounded(builder, builder.load(total), builder.add(at, ir.Constant(_I64, 2 * LANES * chunk)), 2)


def rounded_pair(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors of 16 float32 as one of bfloat16. Subnormal numbers become 0."""
    function_type = ir.FunctionType(BF16_PAIRS, [_VECTOR, _VECTOR])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [second, first])


def _pair_products(
    typing_context: Any, num_rows: Any, left: Any, row_bytes: Any, right: Any, steps: Any, scale: Any, out: Any
) -> Any:
    """out [num_rows, 64] float32 = scale * sum over `steps` pairs of left [row, pair] * right [pair, 64].

    `left`, `right` (bfloat16) and `out` are addresses; `num_rows` is a literal.
    """
    rows = num_rows.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, left, row_bytes, right, steps, scale, out = args
        places = [(row, chunk) for row in range(rows) for chunk in range(CHUNKS)]
        sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
        for place in places:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), sums[place])
        starts = [builder.add(left, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(rows)]
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            add_products(builder, sums, starts, right, loop.index)
        factor = splat(builder, scale)
        for row, chunk in places:
            at = builder.add(out, ir.Constant(_I64, 4 * LANES * (CHUNKS * row + chunk)))
            store_rounded(builder, builder.fmul(builder.load(sums[row, chunk]), factor), at, 4)
        return context.get_dummy_value()

    return numba.void(num_rows, *[numba.int64] * 4, numba.float32, numba.int64), generate


pair_products = cast(Callable[..., None], intrinsic(prefer_literal=True)(_pair_products))
