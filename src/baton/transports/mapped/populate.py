"""Creates the page tables of mapped memory before its first use.

Otherwise each page of 4 KiB costs a fault of 1 to 3 microseconds.
"""

from __future__ import annotations

import ctypes
import mmap
import time
import weakref
from collections.abc import Callable

from baton.transports.base import ByteArray

_MADV_POPULATE_WRITE = 23
PIECE_BYTES = 4 << 20
# Times a piece's: first requests need the CPU.
_PAUSE = 7
# Releases the GIL, unlike `mmap.madvise`.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(memory: ByteArray) -> bool:
    """False if the system does not support it."""
    address = memory.ctypes.data
    start = address - address % mmap.PAGESIZE
    return bool(_madvise(start, address + memory.nbytes - start, _MADV_POPULATE_WRITE) == 0)


def populate_beside(
    memory: ByteArray, post: Callable[[Callable[[], object]], None], sleep: Callable[[float], object] = time.sleep
) -> None:
    """`populate` in pieces, each a job for `post`, with pauses. Does not keep `memory` mapped."""
    mapped = weakref.ref(memory)

    def piece(start: int) -> None:
        if (whole := mapped()) is None:
            return
        began = time.thread_time()
        more = populate(whole[start : start + PIECE_BYTES]) and start + PIECE_BYTES < whole.nbytes
        del whole
        sleep(_PAUSE * (time.thread_time() - began))
        if more:
            post(lambda: piece(start + PIECE_BYTES))

    post(lambda: piece(0))
