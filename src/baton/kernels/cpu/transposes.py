"""Numbers of rows side by side in vectors, widened: tiles of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.kernels.cpu.simd import LANES, element_bytes, load, load_widened, shuffled, splat, store, store_rounded

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_QUARTER = LANES // 4
_FOUR_WORDS = ir.VectorType(_I32, _QUARTER)


def _transposed(typing_context: Any, element: Any, rows: Any, start: Any, destination: Any, stride: Any) -> Any:
    """Transpose 16 x 16 numbers of the type of `element` to float32 at `destination`, `stride` bytes from row to row.
    `rows`: the address of 16 addresses. Source rows begin `start` bytes after those."""
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows, start, destination, stride = args
        starts = [builder.add(load(builder, rows, 8 * j, _I64), start) for j in range(LANES)]
        column = 0
        for byte_offset in range(0, LANES * num_bytes, 4 * _QUARTER):
            for words in _transposed_words(builder, starts, byte_offset):
                for vector in (words,) if num_bytes == 4 else _widened_pairs(builder, words):
                    store(builder, vector, destination, builder.mul(stride, ir.Constant(_I64, column)))
                    column += 1
        return context.get_dummy_value()

    return numba.void(element, *[numba.int64] * 4), generate


def _transposed_words(builder: Any, starts: Sequence[Any], byte_offset: int) -> list[Any]:
    """Four 32-bit words of each of 16 rows: a vector for each word."""
    loaded = []
    for row in range(_QUARTER):
        quarters = [load(builder, starts[row + q], byte_offset, _FOUR_WORDS) for q in range(0, LANES, _QUARTER)]
        halves = [_joined(builder, *quarters[:2]), _joined(builder, *quarters[2:])]
        loaded.append(_joined(builder, *halves))
    transposed = []
    for i in (0, 2):
        lanes = i, LANES + i, i + 1, LANES + i + 1
        left, right = (_shuffle_quarters(builder, loaded[row], loaded[row + 1], lanes) for row in (0, 2))
        transposed += [_shuffle_quarters(builder, left, right, (j, j + 1, LANES + j, LANES + j + 1)) for j in (0, 2)]
    return transposed


def _joined(builder: Any, a: Any, b: Any) -> Any:
    lanes = list(range(2 * a.type.count))
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _shuffle_quarters(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return shuffled(builder, a, b, [lane + q for q in range(0, LANES, _QUARTER) for lane in lanes])


def _widened_pairs(builder: Any, words: Any) -> tuple[Any, Any]:
    low = builder.shl(words, splat(builder, ir.Constant(_I32, 16)))
    high = builder.and_(words, splat(builder, ir.Constant(_I32, -(1 << 16))))
    return low, high


def _widened(typing_context: Any, element: Any, source: Any, destination: Any) -> Any:
    """Widen 16 numbers of the type of `element` at `source` to float32 at `destination`."""
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, load_widened(builder, args[1], num_bytes), args[2])
        return context.get_dummy_value()

    return numba.void(element, numba.int64, numba.int64), generate


def _copied(typing_context: Any, source: Any, destination: Any) -> Any:
    """64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, load(builder, args[0]), args[1])
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64), generate


def _divided(typing_context: Any, element: Any, source: Any, divisor: Any, destination: Any) -> Any:
    """16 float32 by `divisor`, rounded to the type of `element`."""
    num_bytes = element_bytes(element)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, divisor, destination = args
        store_rounded(builder, builder.fdiv(load(builder, source), splat(builder, divisor)), destination, num_bytes)
        return context.get_dummy_value()

    return numba.void(element, numba.int64, numba.float32, numba.int64), generate


transpose = cast(Callable[..., Any], intrinsic(_transposed))
widen = cast(Callable[..., Any], intrinsic(_widened))
copy_line = cast(Callable[..., Any], intrinsic(_copied))
divide = cast(Callable[..., Any], intrinsic(_divided))
