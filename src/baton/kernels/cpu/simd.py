"""SIMD intrinsics on vectors of 16 floats, for loops that LLVM's vectorizer does not handle well.

Instructions are in a fixed order, with explicit fused multiply-adds: the same bits on every CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils as untyped_cgutils
from numba.core import config as untyped_config
from numba.extending import intrinsic

cgutils: Any = untyped_cgutils
_config: Any = untyped_config

LANES = 16
# Chunks of 16 in a row of a tile, which has at most as many rows.
CHUNKS = 4
# Of a cache.
LINE_BYTES = 64

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _NARROW, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I16, LANES), ir.VectorType(_I32, LANES)


def has_features(*names: str) -> bool:
    """Of the CPU that Numba compiles for."""
    if _config.CPU_NAME:
        return all(f"+{name}" in (_config.CPU_FEATURES or "").split(",") for name in names)
    return all(binding.get_host_cpu_features().get(name) for name in names)


def i64(number: int) -> Any:
    return ir.Constant(_I64, number)


def element_bytes(element: Any) -> int:
    return 4 if element == numba.float32 else 2


def _at(builder: Any, address: Any, byte_offset: Any, type_: Any = _VECTOR) -> Any:
    if isinstance(byte_offset, int):
        byte_offset = ir.Constant(_I64, byte_offset)
    return builder.inttoptr(builder.add(address, byte_offset), type_.as_pointer())


def load(builder: Any, address: Any, byte_offset: Any = 0, type_: Any = _VECTOR) -> Any:
    return builder.load(_at(builder, address, byte_offset, type_), align=1)


def store(builder: Any, value: Any, address: Any, byte_offset: Any = 0) -> None:
    builder.store(value, _at(builder, address, byte_offset, value.type), align=1)


def load_widened(builder: Any, address: Any, num_bytes: int) -> Any:
    """Load 16 numbers as float32: bfloat16 (2 bytes) are widened exactly."""
    if num_bytes == 4:
        return load(builder, address)
    words = builder.zext(load(builder, address, 0, _NARROW), _WORDS)
    return builder.bitcast(builder.shl(words, splat(builder, ir.Constant(_I32, 16))), _VECTOR)


def store_rounded(builder: Any, vector: Any, address: Any, num_bytes: int) -> None:
    """Store 16 float32, unchanged or rounded to the nearest bfloat16 (2 bytes)."""
    if num_bytes == 4:
        return store(builder, vector, address)
    half, one, most = (splat(builder, ir.Constant(_I32, value)) for value in (16, 1, 0x7FFF))
    bits = builder.bitcast(vector, _WORDS)
    even = builder.and_(builder.lshr(bits, half), one)
    rounded = builder.lshr(builder.add(builder.add(bits, most), even), half)
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    rounded = builder.select(is_nan, splat(builder, ir.Constant(_I32, 0x7FC0)), rounded)
    store(builder, builder.trunc(rounded, _NARROW), address)


def splat(builder: Any, scalar: Any) -> Any:
    type_ = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(type_, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return shuffled(builder, one, one, [0] * LANES)


def shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, LANES), list(lanes))
    return builder.shuffle_vector(a, b, mask)


def constant(builder: Any, value: float) -> Any:
    return splat(builder, ir.Constant(_F32, struct.unpack("f", struct.pack("f", value))[0]))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.fma.v16f32"), [a, b, c])


def larger(builder: Any, a: Any, b: Any) -> Any:
    """`a` if either is NaN, so that `_exp` propagates NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def folded(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce all lanes to one number, pairwise, halves first."""
    return builder.extract_element(folded_lanes(builder, vector, combine), ir.Constant(_I32, 0))


def folded_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """As `folded`, in each lane."""
    half = LANES // 2
    while half:
        other = shuffled(builder, vector, vector, [(lane + half) % LANES for lane in range(LANES)])
        vector, half = combine(builder, vector, other), half // 2
    return vector


def _visible(builder: Any, first: Any, last: Any, chunk: int) -> Any:
    """The mask of this chunk's lanes in [first, last) of a row."""
    lanes = ir.Constant(_WORDS, [chunk * LANES + lane for lane in range(LANES)])
    low, high = (splat(builder, builder.trunc(edge, _I32)) for edge in (first, last))
    return builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))


def prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Bring bytes into the second cache. They need not exist."""
    pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    is_write, locality, is_data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    for line in range(0, num_bytes, LINE_BYTES):
        place = builder.inttoptr(builder.add(address, ir.Constant(_I64, line)), pointer)
        builder.call(function, [place, is_write, locality, is_data])


def _touched(typing_context: Any, address: Any) -> Any:
    """Read the 8 bytes around this address. CPUs drop prefetches when it matters most."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Atomic: an unused plain read would be removed.
        aligned = builder.and_(args[0], ir.Constant(_I64, -8))
        builder.load_atomic(builder.inttoptr(aligned, _I64.as_pointer()), "monotonic", 8)
        return context.get_dummy_value()

    return numba.void(numba.int64), generate


def chunks_at_once(num_rows: int) -> int:
    """Chunks of 1 to 4 rows whose sums fit in registers: 32 of 16 floats, or 16 of 8."""
    return CHUNKS if has_features("avx512f") else max(1, CHUNKS // num_rows)


def _products(
    typing_context: Any, num_rows: Any, num_chunks: Any, left: Any, row_bytes: Any, right: Any, right_bytes: Any,
    steps: Any, width: Any, factors: Any, out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [num_rows, width] = out * its row's factor + sum over `steps` of left [row, step] * right [step].

    `factors` 0: out begins at zero. `row_bytes`, `right_bytes` and `out_bytes` are row strides. `width` is a multiple
    of 16. Sums run in order of the steps. `num_rows` and `num_chunks` are literals.
    """
    rows, most = num_rows.literal_value, num_chunks.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, left, row_bytes, right, right_bytes, steps, width, factors, out, out_bytes = args

        def add(first: Any, chunks: int) -> None:
            begin = builder.mul(first, ir.Constant(_I64, 4 * LANES))
            here, there = builder.add(right, begin), builder.add(out, begin)
            places = [(row, chunk) for row in range(rows) for chunk in range(chunks)]
            sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
            starts = [builder.add(there, builder.mul(out_bytes, ir.Constant(_I64, row))) for row in range(rows)]
            with builder.if_else(builder.icmp_signed("!=", factors, ir.Constant(_I64, 0))) as (then, otherwise):
                with then:
                    for row, chunk in places:
                        factor = splat(builder, load(builder, factors, 4 * row, _F32))
                        total = builder.fmul(load(builder, starts[row], 4 * LANES * chunk), factor)
                        builder.store(total, sums[row, chunk])
                with otherwise:
                    for place in places:
                        builder.store(constant(builder, 0.0), sums[place])
            with cgutils.for_range(builder, steps, intp=_I64) as loop:
                base = builder.add(here, builder.mul(loop.index, right_bytes))
                vectors = [load(builder, base, 4 * LANES * chunk) for chunk in range(chunks)]
                step = builder.mul(loop.index, ir.Constant(_I64, 4))
                for row in range(rows):
                    at = builder.add(builder.mul(row_bytes, ir.Constant(_I64, row)), step)
                    scalar = splat(builder, load(builder, left, at, _F32))
                    for chunk in range(chunks):
                        total = builder.load(sums[row, chunk])
                        builder.store(fma(builder, scalar, vectors[chunk], total), sums[row, chunk])
            for row, chunk in places:
                store(builder, builder.load(sums[row, chunk]), starts[row], 4 * LANES * chunk)

        chunks = builder.sdiv(width, ir.Constant(_I64, LANES))
        blocks = builder.sdiv(chunks, ir.Constant(_I64, most))
        with cgutils.for_range(builder, blocks, intp=_I64) as block:
            add(builder.mul(block.index, ir.Constant(_I64, most)), most)
        if most > 1:
            rest = builder.mul(blocks, ir.Constant(_I64, most))
            with cgutils.for_range_slice(builder, rest, chunks, ir.Constant(_I64, 1), intp=_I64) as (chunk, _):
                add(chunk, 1)
        return context.get_dummy_value()

    return numba.void(num_rows, num_chunks, *[numba.int64] * 9), generate


def _largest(typing_context: Any, scores: Any, first: Any, last: Any) -> Any:
    """The largest of lanes [first, last) of the 64 float32 at `scores`; -inf for none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, first, last = args
        least = constant(builder, float("-inf"))
        found = least
        for chunk in range(CHUNKS):
            values = load(builder, scores, 4 * LANES * chunk)
            values = builder.select(_visible(builder, first, last, chunk), values, least)
            found = larger(builder, values, found)
        return folded(builder, found, larger)

    return numba.float32(numba.int64, numba.int64, numba.int64), generate


# As `scalar.exp32`, with fused multiply-adds.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _exp(builder: Any, x: Any) -> Any:
    x = larger(builder, x, constant(builder, -87.0))
    magic = constant(builder, 12582912.0)
    shifted = fma(builder, x, constant(builder, 1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, constant(builder, -0.693359375), x)
    r = fma(builder, n, constant(builder, 2.12194440e-4), r)
    poly = constant(builder, _EXP[0])
    for coefficient in _EXP[1:]:
        poly = fma(builder, poly, r, constant(builder, coefficient))
    value = builder.fadd(fma(builder, poly, builder.fmul(r, r), r), constant(builder, 1.0))
    biased = builder.add(builder.bitcast(shifted, _WORDS), splat(builder, ir.Constant(_I32, 127)))
    power = builder.bitcast(builder.shl(biased, splat(builder, ir.Constant(_I32, 23))), _VECTOR)
    return builder.fmul(value, power)


def _exponentials(typing_context: Any, scores: Any, first: Any, last: Any, peak: Any) -> Any:
    """Replace each of the 64 float32 s at `scores` by e^(s - peak), or 0 outside of lanes [first, last). Returns the
    sum. No s may exceed `peak`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, first, last, peak = args
        nothing, peaks = constant(builder, 0.0), splat(builder, peak)
        weights = []
        for chunk in range(CHUNKS):
            values = builder.fsub(load(builder, scores, 4 * LANES * chunk), peaks)
            values = builder.select(_visible(builder, first, last, chunk), _exp(builder, values), nothing)
            store(builder, values, scores, 4 * LANES * chunk)
            weights.append(values)
        total = builder.fadd(builder.fadd(weights[0], weights[2]), builder.fadd(weights[1], weights[3]))
        return folded(builder, total, lambda builder, a, b: builder.fadd(a, b))

    return numba.float32(numba.int64, numba.int64, numba.int64, numba.float32), generate


def _square_sum(typing_context: Any, element: Any, source: Any, count: Any) -> Any:
    """Sum of squares in float32 of `count` numbers of the type of `element`; `count` is a multiple of 16.

    Lane i % 16 sums number i, in order; the lanes are added at the end.
    """
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, count = args
        total = cgutils.alloca_once(builder, _VECTOR)
        builder.store(constant(builder, 0.0), total)
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(_I64, LANES)), intp=_I64) as loop:
            at = builder.add(source, builder.mul(loop.index, ir.Constant(_I64, LANES * num_bytes)))
            values = load_widened(builder, at, num_bytes)
            builder.store(fma(builder, values, values, builder.load(total)), total)
        return folded(builder, builder.load(total), lambda builder, a, b: builder.fadd(a, b))

    return numba.float32(element, numba.int64, numba.int64), generate


def _silu_times(typing_context: Any, element: Any, gate: Any, up: Any, out: Any) -> Any:
    """silu(gate) * up in float32 of 16 numbers of the type of `element` each, rounded once."""
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, gate, up, out = args
        gates, ups = load_widened(builder, gate, num_bytes), load_widened(builder, up, num_bytes)
        # Beyond 88 the _exp would overflow, and the quotient is 0 anyway.
        minus = builder.fsub(constant(builder, 0.0), gates)
        most = constant(builder, 88.0)
        minus = builder.select(builder.fcmp_ordered(">", minus, most), most, minus)
        below = builder.fadd(_exp(builder, minus), constant(builder, 1.0))
        store_rounded(builder, builder.fmul(builder.fdiv(gates, below), ups), out, num_bytes)
        return context.get_dummy_value()

    return numba.void(element, numba.int64, numba.int64, numba.int64), generate


def _added(typing_context: Any, element: Any, left: Any, right: Any, out: Any) -> Any:
    """left + right, 16 numbers of the type of `element` each, rounded once."""
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, left, right, out = args
        total = builder.fadd(load_widened(builder, left, num_bytes), load_widened(builder, right, num_bytes))
        store_rounded(builder, total, out, num_bytes)
        return context.get_dummy_value()

    return numba.void(element, numba.int64, numba.int64, numba.int64), generate


def _scaled(typing_context: Any, element: Any, source: Any, factor: Any, weight: Any, out: Any) -> Any:
    """16 numbers of the type of `element` times `factor`, rounded, times those at `weight`, rounded again."""
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, factor, weight, out = args
        normed = builder.fmul(load_widened(builder, source, num_bytes), splat(builder, factor))
        store_rounded(builder, normed, out, num_bytes)
        product = builder.fmul(load_widened(builder, weight, num_bytes), load_widened(builder, out, num_bytes))
        store_rounded(builder, product, out, num_bytes)
        return context.get_dummy_value()

    return numba.void(element, numba.int64, numba.float32, numba.int64, numba.int64), generate


_Call = Callable[..., Any]
touch = cast(_Call, intrinsic(_touched))
products = cast(_Call, intrinsic(prefer_literal=True)(_products))
largest = cast(_Call, intrinsic(_largest))
exponentials = cast(_Call, intrinsic(_exponentials))
square_sum = cast(_Call, intrinsic(_square_sum))
silu_times = cast(_Call, intrinsic(_silu_times))
added = cast(_Call, intrinsic(_added))
scaled = cast(_Call, intrinsic(_scaled))
