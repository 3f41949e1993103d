"""Creates the page tables of mapped memory before its first use.

Otherwise each page of 4 KiB costs a fault of 1 to 3 microseconds in each process.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable

from baton.transports.base import ByteArray

_MADV_POPULATE_WRITE = 23
# About a millisecond of delay for other jobs.
PIECE_BYTES = 4 << 20
# Releases the GIL, unlike `mmap.madvise`.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(memory: ByteArray) -> bool:
    """False if the system does not support it. Changes no byte."""
    address = memory.ctypes.data
    start = address - address % mmap.PAGESIZE
    return bool(_madvise(start, address + memory.nbytes - start, _MADV_POPULATE_WRITE) == 0)


def populate_beside(memory: ByteArray, post: Callable[[Callable[[], object]], None]) -> None:
    """`populate` in pieces, each a job for `post`, so that other jobs run in between. Does not keep `memory` mapped."""
    mapped = weakref.ref(memory)

    def piece(start: int) -> None:
        whole = mapped()
        if whole is None or not populate(whole[start : start + PIECE_BYTES]):
            return
        if start + PIECE_BYTES < whole.nbytes:
            post(lambda: piece(start + PIECE_BYTES))

    post(lambda: piece(0))
