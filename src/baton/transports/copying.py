"""The compiled copy loop for mapped memory. Scattered short runs are copied in turn, a few cache lines each
(docs/transports.md): one by one they take nearly twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from baton.jit_cache import compiled
from baton.kv.geometry import CopyList, Int64Array
from baton.transports.base import ByteArray

# Bytes per `memcpy`, so that a cancel takes effect within a fraction of a millisecond. A longer one bypasses the cache,
# slower than the loop below.
CHUNK_BYTES = 256 << 10
# Runs copied in turn, and bytes per step.
LANES = 8
STEP_BYTES = 256
# `memcpy` is as fast for shorter runs (in the mean), and for longer ones in the caches.
SHORT_BYTES, LONG_BYTES = 1 << 10, 128 << 10
# Larger copies bypass the caches, which would not hold them until they are read.
PAST_CACHES_BYTES = 16 << 20
_LINE_BYTES = 64

F = TypeVar("F", bound=Callable[..., int | None])
_I32, _I64, _LINE = ir.IntType(32), ir.IntType(64), ir.VectorType(ir.IntType(8), _LINE_BYTES)


def _step_by(past_caches: bool) -> Callable[..., Any]:
    def _step(typing_context: Any, dest: Any, source: Any) -> Any:
        """Copy `STEP_BYTES` to a line-aligned address."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def line(address: Any, offset: int) -> Any:
                return builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), _LINE.as_pointer())

            offsets = range(0, STEP_BYTES, _LINE_BYTES)
            loaded = [builder.load(line(args[1], offset), align=1) for offset in offsets]
            for offset, value in zip(offsets, loaded, strict=True):
                store = builder.store(value, line(args[0], offset), align=_LINE_BYTES)
                if past_caches:
                    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
            return context.get_dummy_value()

        return numba.void(numba.int64, numba.int64), generate

    return _step


def _ordered(typing_context: Any) -> Any:
    """Non-temporal stores are not ordered otherwise."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), generate


_step_near = cast("Callable[[int, int], None]", intrinsic(_step_by(past_caches=False)))
_step_past = cast("Callable[[int, int], None]", intrinsic(_step_by(past_caches=True)))
_order = cast("Callable[[], None]", intrinsic(_ordered))
_njit = cast("Callable[[F], F]", numba.njit(nogil=True, boundscheck=False, forceinline=True))
# Machine words, as the C ABI passes pointers.
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@_njit
def _memcpy_unless_stopped(source: int, dest: int, nbytes: int, flags: Int64Array) -> int:
    at = 0
    # The flag is reloaded, since memcpy is opaque to the compiler.
    while at < nbytes and flags[0] == 0:
        size = min(nbytes - at, CHUNK_BYTES)
        _memcpy(dest + at, source + at, size)
        at += size
    return at


@_njit
def _advance(lanes: Int64Array, count: int, past_caches: bool) -> None:
    """Advance `count` lanes by as many steps as all have left, up to a chunk."""
    span = CHUNK_BYTES
    for lane in range(count):
        span = min(span, lanes[2, lane])
    span -= span % STEP_BYTES
    for at in range(0, span, STEP_BYTES):
        for lane in range(count):
            if past_caches:
                _step_past(lanes[1, lane] + at, lanes[0, lane] + at)
            else:
                _step_near(lanes[1, lane] + at, lanes[0, lane] + at)
    for lane in range(count):
        lanes[0, lane] += span
        lanes[1, lane] += span
        lanes[2, lane] -= span


@_njit
def _until_stopped(
    source: int, dest: int, source_offset: Int64Array, dest_offset: Int64Array, nbytes: Int64Array, flags: Int64Array
) -> int:
    total = nbytes.sum()
    past_caches = total >= PAST_CACHES_BYTES
    # Within the caches fewer lanes are faster.
    abreast = LANES if past_caches else LANES // 2
    shortest = STEP_BYTES if total >= SHORT_BYTES * nbytes.size else LONG_BYTES
    longest = total if past_caches else LONG_BYTES - 1
    # Per lane: source address, destination address, bytes left.
    lanes = np.empty((3, LANES), dtype=np.int64)
    count = at = ended = 0
    while True:
        while count < abreast and at < nbytes.size:
            read, write, left = source + source_offset[at], dest + dest_offset[at], nbytes[at]
            if shortest <= left <= longest and write % _LINE_BYTES == 0:
                lanes[0, count], lanes[1, count], lanes[2, count] = read, write, left
                count += 1
            elif _memcpy_unless_stopped(read, write, left, flags) == left:
                ended += 1
            else:
                return ended
            flags[1] = ended
            at += 1
        if count == 0 or flags[0] != 0:
            return ended
        _advance(lanes, count, past_caches)
        lane = 0
        while lane < count:
            if lanes[2, lane] >= STEP_BYTES:
                lane += 1
                continue
            _memcpy(lanes[1, lane], lanes[0, lane], lanes[2, lane])
            ended += 1
            count -= 1
            for row in range(3):
                lanes[row, lane] = lanes[row, count]
        flags[1] = ended


def _copy_runs(
    source: int, dest: int, source_offset: Int64Array, dest_offset: Int64Array, nbytes: Int64Array, flags: Int64Array
) -> int:
    ended = _until_stopped(source, dest, source_offset, dest_offset, nbytes, flags)
    _order()
    return ended


_column = types.Array(types.int64, 1, "C", readonly=False)
_signature = types.int64(types.int64, types.int64, _column, _column, _column, types.Array(types.int64, 1, "C"))
# Compiled at import (later from the cache), never during a transfer.
_compiled = cast("Callable[..., int]", compiled(_copy_runs, _signature, nogil=True, boundscheck=False))


def copy_runs(source: ByteArray, dest: ByteArray, copies: CopyList, flags: Int64Array) -> int:
    """Returns the number of finished runs. Releases the GIL.

    `flags`: as of `Operation`. The caller has checked the bounds, and keeps the memory alive; runs must not overlap.
    """
    return _compiled(
        source.ctypes.data,
        dest.ctypes.data,
        _writable(copies.source_offset),
        _writable(copies.dest_offset),
        _writable(copies.nbytes),
        flags,
    )


def _writable(column: Int64Array) -> Int64Array:
    # The compiled signature takes writable arrays; a view of a message is not.
    return column if column.flags.writeable else column.copy()
