"""The first of a row's greatest numbers. Few exceed all before them: vectors pass over the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.extending import intrinsic
from torch import Tensor

from baton.jit_cache import jit
from baton.kernels.cpu.omp import Kernel, arguments, pointer, take, threads_for
from baton.kernels.cpu.simd import load

# Numbers that `exceeds` reads.
AT_ONCE = 32
# Numbers worth one more thread.
_PARALLEL_NUMBERS = 1 << 18
_NUM_ARGUMENTS = 5
_BFLOAT16_BITS, _FLOAT32_BITS = 16, 32


def _infinite(bits: int) -> int:
    """The bits of infinity."""
    return 0x7F80 << (bits - _BFLOAT16_BITS)


def _exceeds(typing_context: Any, at: Any, limit: Any) -> Any:
    """Whether one of 32 numbers at address `at` is not finite or has at least the order less `limit`, as of
    `Ordered.limit_above`. They have as many bits as `limit`."""
    bits = limit.bitwidth

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(bits), AT_ONCE)

        def filled(number: Any) -> Any:
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), AT_ONCE), [0] * AT_ONCE)
            return builder.shuffle_vector(one, one, lanes)

        def constant(number: int) -> Any:
            return filled(ir.Constant(ir.IntType(bits), number))

        numbers, greatest_finite = load(builder, args[0], 0, vector), _infinite(bits) - 1
        # The order of numbers, less that of the least finite one. Those below it wrap around.
        positive = builder.add(numbers, constant(greatest_finite))
        negative = builder.sub(constant(greatest_finite + (1 << (bits - 1))), numbers)
        ordered = builder.select(builder.icmp_signed("<", numbers, constant(0)), negative, positive)
        found = builder.icmp_unsigned(">=", ordered, filled(args[1]))
        found = builder.bitcast(found, ir.IntType(AT_ONCE))
        return builder.icmp_unsigned("!=", found, ir.Constant(ir.IntType(AT_ONCE), 0))

    return numba.boolean(numba.int64, limit), generate


exceeds = cast(Callable[..., Any], intrinsic(_exceeds))


class Ordered(NamedTuple):
    """Floating-point numbers of one width, by their bits.

    `order`: an integer with the order of numbers. `greatest`: of an array, its order and number plus `first`; with
    `checks` (infinity, -1) if one is not finite. `limit_above`: the `limit` that numbers of a greater order reach.
    """

    order: Callable[[Any], Any]
    greatest: Callable[[Any, int, int], tuple[float, int]]
    limit_above: Callable[[float], Any]


def _ordered(bits: int, number: Any) -> Ordered:
    sign, infinite = 1 << (bits - 1), _infinite(bits)

    @jit
    def order(bits: Any) -> Any:
        return np.int64(bits) if bits < sign else sign - np.int64(bits)

    @jit
    def greatest(numbers: Any, first: int, checks: int) -> tuple[float, int]:
        best, place, magnitude = np.int64(-sign), 0, np.int64(0)
        for i in range(len(numbers)):
            own = order(numbers[i])
            magnitude = max(magnitude, np.int64(numbers[i]) & (sign - 1))
            if own > best:
                best, place = own, i
        if checks != 0 and magnitude >= infinite:
            return np.inf, -1
        return np.float64(best), first + place

    @jit
    def limit_above(order: float) -> Any:
        # Beyond any number's: an infinite order.
        return number(min(max(order, -infinite) + infinite, 2 * sign - 1))

    return Ordered(order, greatest, limit_above)


BFLOAT16, _FLOAT32 = _ordered(_BFLOAT16_BITS, np.uint16), _ordered(_FLOAT32_BITS, np.uint32)
_greatest, _limit_above = _FLOAT32.greatest, _FLOAT32.limit_above


def _find(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, x, places = a[1], a[2], a[3], carray(pointer(a[4], np.int64(0)), (a[1],))
    row = take(arguments)
    while row < num_rows:
        at = x + row * columns * 4
        numbers = carray(pointer(at, np.uint32(0)), (columns,))
        best, places[row], limit = -np.inf, 0, np.uint32(0)
        for first in range(0, columns, AT_ONCE):
            stop = min(first + AT_ONCE, columns)
            if stop - first < AT_ONCE or exceeds(at + first * 4, limit):
                order, place = _greatest(numbers[first:stop], first, 1)
                if order > best:
                    best, places[row], limit = order, place, _limit_above(order)
        row = take(arguments)


_FIND = Kernel(_find)


def first_greatest(x: Tensor) -> npt.NDArray[np.int64]:
    """The column of the first greatest number of each row of contiguous float32 x [N, V]; -1: some are not finite."""
    num_rows, columns = x.shape
    places = np.zeros(num_rows, dtype=np.int64)
    if num_rows:
        given = arguments(num_rows, columns, x.data_ptr(), places.ctypes.data)
        _FIND.call(given, threads_for(x.numel(), _PARALLEL_NUMBERS))
    return places
