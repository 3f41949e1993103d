"""Steps of recurrences: a head's state [N, P], with sums over N, in order, in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.kernels.cpu.simd import LANES, cgutils, fma, load, splat, store

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
# Chunks of 16 numbers at a time.
_CHUNKS = 2
_CHUNK_BYTES = 4 * LANES


def _for_columns(builder: Any, size: Any, step: Callable[[Any, int], None]) -> None:
    """`step(byte offset, chunks)` for all whole chunks."""
    chunks = builder.sdiv(size, ir.Constant(_I64, LANES))
    pairs = builder.sdiv(chunks, ir.Constant(_I64, _CHUNKS))
    with cgutils.for_range(builder, pairs, intp=_I64) as pair:
        step(builder.mul(pair.index, ir.Constant(_I64, _CHUNKS * _CHUNK_BYTES)), _CHUNKS)
    rest = builder.mul(pairs, ir.Constant(_I64, _CHUNKS))
    with cgutils.for_range_slice(builder, rest, chunks, ir.Constant(_I64, 1), intp=_I64) as (chunk, _):
        step(builder.mul(chunk, ir.Constant(_I64, _CHUNK_BYTES)), 1)


def _number(builder: Any, numbers: Any, index: Any, stride: Any = 4) -> Any:
    stride = ir.Constant(_I64, stride) if isinstance(stride, int) else stride
    return splat(builder, load(builder, numbers, builder.mul(index, stride), _F32))


def _recalled(
    typing_context: Any, state: Any, width: Any, size: Any, decays: Any, decay_bytes: Any, keys: Any, out: Any
) -> Any:
    """out [P] = sum over n of state [n] * decays [n] * keys [n]. The state stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, width, size, decays, decay_bytes, keys, out = args
        row_bytes = builder.mul(size, ir.Constant(_I64, 4))

        def step(begin: Any, chunks: int) -> None:
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(chunks)]
            for total in sums:
                builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
            with cgutils.for_range(builder, width, intp=_I64) as loop:
                row = builder.add(builder.add(state, begin), builder.mul(loop.index, row_bytes))
                decay, key = _number(builder, decays, loop.index, decay_bytes), _number(builder, keys, loop.index)
                for chunk, total in enumerate(sums):
                    value = builder.fmul(load(builder, row, chunk * _CHUNK_BYTES), decay)
                    builder.store(fma(builder, value, key, builder.load(total)), total)
            for chunk, total in enumerate(sums):
                store(builder, builder.load(total), builder.add(out, begin), chunk * _CHUNK_BYTES)

        _for_columns(builder, size, step)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 7), generate


def _updated(fuses_decay: bool) -> Callable[..., Any]:
    """`fuses_decay`: the other product is rounded."""

    def typed(
        typing_context: Any, state: Any, width: Any, size: Any, decays: Any, decay_bytes: Any, x: Any, keys: Any,
        queries: Any, sums: Any,
    ) -> Any:  # fmt: skip
        """state [n] = state [n] * decays [n] + keys [n] * x [P]; sums [P] += state [n] * queries [n]."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            state, width, size, decays, decay_bytes, x, keys, queries, sums = args
            row_bytes = builder.mul(size, ir.Constant(_I64, 4))

            def step(begin: Any, chunks: int) -> None:
                offsets = [chunk * _CHUNK_BYTES for chunk in range(chunks)]
                totals = [cgutils.alloca_once(builder, _VECTOR) for _ in offsets]
                inputs = [load(builder, builder.add(x, begin), offset) for offset in offsets]
                for offset, total in zip(offsets, totals, strict=True):
                    builder.store(load(builder, builder.add(sums, begin), offset), total)
                with cgutils.for_range(builder, width, intp=_I64) as loop:
                    row = builder.add(builder.add(state, begin), builder.mul(loop.index, row_bytes))
                    decay, key = _number(builder, decays, loop.index, decay_bytes), _number(builder, keys, loop.index)
                    query = _number(builder, queries, loop.index)
                    for offset, total, given in zip(offsets, totals, inputs, strict=True):
                        value = load(builder, row, offset)
                        if fuses_decay:
                            value = fma(builder, value, decay, builder.fmul(key, given))
                        else:
                            value = fma(builder, key, given, builder.fmul(value, decay))
                        store(builder, value, row, offset)
                        builder.store(fma(builder, value, query, builder.load(total)), total)
                for offset, total in zip(offsets, totals, strict=True):
                    store(builder, builder.load(total), builder.add(sums, begin), offset)

            _for_columns(builder, size, step)
            return context.get_dummy_value()

        return numba.void(*[numba.int64] * 9), generate

    return typed


_Call = Callable[..., Any]
recall = cast(_Call, intrinsic(_recalled))
update, update_fused = cast(_Call, intrinsic(_updated(False))), cast(_Call, intrinsic(_updated(True)))
