"""Run compiled kernels on PyTorch's OpenMP threads.

OpenMP threads spin for milliseconds before they sleep: another pool would compete. Kernels run in the same team,
through GNU's runtime (libgomp) in PyTorch's Linux wheels, elsewhere on Python threads.

A kernel takes a pointer to int64 arguments: numbers and addresses of arrays. All threads share the work by `take`;
results must not depend on which thread takes which piece.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import callback

_numba: Any = numba
_ARGUMENTS = _numba.types.CPointer(numba.int64)


def _take(typing_context: Any, arguments: Any) -> Any:
    """The next piece of work, from 0: an atomic increment of the first argument."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return numba.int64(_ARGUMENTS), generate


def _pointer(typing_context: Any, address: Any, element: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(_numba.types.CPointer(element)))

    return _numba.types.CPointer(element)(address, element), generate


def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return numba.float32(numba.int64), generate


take = cast(Callable[[Any], Any], intrinsic(_take))
pointer = cast(Callable[[Any, Any], Any], intrinsic(_pointer))
float_of = cast(Callable[[Any], Any], intrinsic(_float_of))


class Kernel:
    """Compiled at its first call."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @functools.cached_property
    def compiled(self) -> Any:
        return callback(self._function, numba.void(_ARGUMENTS), error_model="numpy")

    @functools.cached_property
    def _entries(self) -> tuple[Any, Any, int]:
        address = self.compiled.address
        return (
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address),
            address,
        )

    def call_inline(self, arguments: Any) -> None:
        """Run in this thread, for a few microseconds, with the GIL."""
        self._entries[0](arguments)

    def call(self, arguments: Any, threads: int) -> None:
        """`threads` include the calling one."""
        _, alone, address = self._entries
        if threads == 1:
            alone(arguments)
        elif (team := gomp_parallel()) is not None:
            team(address, arguments, threads, 0)
        else:
            # Wait even on Ctrl-C: threads write into the arguments' arrays.
            jobs = [_pool(threads).submit(alone, arguments) for _ in range(threads - 1)]
            try:
                alone(arguments)
            finally:
                for job in jobs:
                    job.result()


@functools.cache
def gomp_parallel() -> Any:
    """None if the loaded OpenMP runtime is not libgomp."""
    try:
        function = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernels")


def threads_for(work: float, least: float) -> int:
    return max(1, min(torch.get_num_threads(), int(work / least)))


def arguments(*values: int) -> Any:
    """A kernel's arguments, after the counter of `take`."""
    return (ctypes.c_int64 * (1 + len(values)))(0, *values)


@functools.cache
def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
