"""Stages of work within one parallel region: a team's threads share the pieces of a stage, then wait for its end.

A stage ends by finished pieces, not by threads that arrive: a preempted thread delays others only within a piece; late
ones skip finished work. A wait spins for the time of a few pieces, then yields its core at each check.

A stage's counters of taken pieces, finished ones and slots are int64 in a cache line, initially 0.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from baton.jit_cache import jit
from baton.kernels.cpu.omp import pointer, take
from baton.kernels.cpu.simd import cgutils

STAGE_BYTES = 64
_FINISHED, _SLOTS = 8, 16
# Checks of a stage's counter before the core is yielded: some tens of microseconds.
_SPINS = 2_000
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _add(typing_context: Any, address: Any, count: Any) -> Any:
    """Add `count` to the int64 at `address`, after all earlier writes of this thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "release")
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64), generate


def _read(typing_context: Any, address: Any) -> Any:
    """The int64 at `address`. Writes before its last addition are visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return numba.int64(numba.int64), generate


def _pause(typing_context: Any) -> Any:
    """Spin-wait hint for hyper-threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return numba.void(), generate


def _yield_core(typing_context: Any) -> Any:
    """The C library's `sched_yield`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return numba.void(), generate


_Call = Callable[..., Any]
_add_to, _read_at = cast(_Call, intrinsic(_add)), cast(_Call, intrinsic(_read))
_spin, _sleep = cast(_Call, intrinsic(_pause)), cast(_Call, intrinsic(_yield_core))


@jit
def take_piece(stage: Any) -> Any:
    """The stage's next piece, from 0."""
    return take(pointer(stage, np.int64(0)))


@jit
def take_slot(stage: Any) -> Any:
    """The number of a thread among those that took pieces, by which others find its results after the stage."""
    return take(pointer(stage + _SLOTS, np.int64(0)))


@jit
def num_slots(stage: Any) -> Any:
    return _read_at(stage + _SLOTS)


@jit
def finish(stage: Any, mine: Any, total: Any) -> None:
    """Count `mine` finished pieces, and wait until all `total` are."""
    if mine > 0:
        _add_to(stage + _FINISHED, mine)
    looks = 0
    while _read_at(stage + _FINISHED) < total:
        looks += 1
        if looks < _SPINS:
            _spin()
        else:
            _sleep()
