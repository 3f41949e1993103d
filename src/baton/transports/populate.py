"""Memory that is mapped gets its page tables before it is used.

A mapped file is there, but each page of it costs a fault at its first use in each process that maps it: 1 to 3
microseconds a page of 4 KiB, in the midst of a forward pass or of a copy. Linux enters many at once, for a quarter of
a second a GiB, where it is asked to (`MADV_POPULATE_WRITE`, since 5.14); elsewhere pages come as they are used.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable

from baton.transports.base import ByteArray

_MADV_POPULATE_WRITE = 23
# About a millisecond each: what waits behind a piece waits no longer.
PIECE_BYTES = 4 << 20
# Called without the interpreter lock, unlike `mmap.madvise`.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(memory: ByteArray) -> bool:
    """Enter the pages of mapped memory, whose bytes stay as they are. False where the system does not."""
    address = memory.ctypes.data
    start = address - address % mmap.PAGESIZE
    return bool(_madvise(start, address + memory.nbytes - start, _MADV_POPULATE_WRITE) == 0)


def populate_beside(memory: ByteArray, post: Callable[[Callable[[], object]], None]) -> None:
    """`populate` in pieces, each of them a job for `post`, so that others come in between. It keeps `memory` mapped no
    longer than others do."""
    mapped = weakref.ref(memory)

    def piece(start: int) -> None:
        whole = mapped()
        if whole is None or not populate(whole[start : start + PIECE_BYTES]):
            return
        if start + PIECE_BYTES < whole.nbytes:
            post(lambda: piece(start + PIECE_BYTES))

    post(lambda: piece(0))
