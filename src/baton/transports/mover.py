"""The compiled copy loop and the worker thread that runs it without the interpreter lock.

One `memcpy` per run costs some nanoseconds here; a Python loop pays about a microsecond per run, which is
more than a 4 KiB copy takes. Long runs are copied in chunks, so that a cancel is seen within a fraction of a
millisecond.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import numba
from numba import types

from baton.kv.geometry import CopyList, Int64Array
from baton.transports.base import ByteArray, Operation

# Whole mebibytes are copied at four fifths of this speed: a memcpy as long as the cache does not use it.
CHUNK_BYTES = 256 << 10

# Addresses and sizes travel as machine words, which is how the C ABI passes pointers too.
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


def _copy_runs(
    source: int,
    dest: int,
    source_offset: Int64Array,
    dest_offset: Int64Array,
    nbytes: Int64Array,
    chunk: int,
    flags: Int64Array,
) -> int:
    for i in range(nbytes.size):
        at = 0
        while at < nbytes[i]:
            # The call to memcpy is opaque to the compiler, so this is loaded anew each time.
            if flags[0] != 0:
                return i
            step = min(nbytes[i] - at, chunk)
            _memcpy(dest + dest_offset[i] + at, source + source_offset[i] + at, step)
            at += step
        flags[1] = i + 1
    return nbytes.size


_column = types.Array(types.int64, 1, "C", readonly=False)
_signature = types.int64(
    types.int64, types.int64, _column, _column, _column, types.int64, types.Array(types.int64, 1, "C")
)
# Compiled when this module is imported (from the cache after the first time), never during a transfer.
_compiled = cast("Callable[..., int]", numba.njit(_signature, nogil=True, cache=True, boundscheck=False)(_copy_runs))


def copy_runs(source: ByteArray, dest: ByteArray, copies: CopyList, flags: Int64Array) -> int:
    """Copy every run of `copies` from `source` to `dest`, both uint8 `[bytes]`; return how many runs ended.

    Runs without the interpreter lock. `flags` is int64 `[2]`: stops early once `flags[0]` is non-zero, counts
    ended runs in `flags[1]`. The caller has checked the bounds, and keeps the memory alive; runs must not
    overlap.
    """
    return _compiled(
        source.ctypes.data,
        dest.ctypes.data,
        _writable(copies.source_offset),
        _writable(copies.dest_offset),
        _writable(copies.nbytes),
        CHUNK_BYTES,
        flags,
    )


def _writable(column: Int64Array) -> Int64Array:
    # The one compiled signature takes writable arrays; a read-only one (a view of a message) is copied.
    return column if column.flags.writeable else column.copy()


class Mover:
    """A worker thread that runs submitted jobs in order. Sleeps when there are none."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def submit(self, source: ByteArray, dest: ByteArray, copies: CopyList, operation: Operation) -> None:
        """Queue one copy list; `operation` ends when it is copied, or as failed when its flag stopped it."""

        def job() -> None:
            if not operation.start():
                return  # withdrawn while it waited here
            try:
                ended = copy_runs(source, dest, copies, operation.flags)
            except Exception as error:  # an operation that never ended would pin its pages for good
                operation.end(f"copy failed: {error}")
                return
            # Caches are coherent on one host, and ending the operation takes a lock: whoever sees `done`, in
            # this process or after a message from it, sees the bytes.
            operation.end(None if ended == len(copies) else f"cancelled after {ended} of {len(copies)} runs")

        self._jobs.put(job)

    def post(self, job: Callable[[], object]) -> None:
        """Run `job`, which must not raise, after the jobs that are queued."""
        self._jobs.put(job)

    def close(self) -> None:
        """Wait for the queued jobs, which their flags can stop, then end the thread."""
        self._jobs.put(None)
        self._thread.join()
