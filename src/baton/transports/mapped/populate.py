"""Creates the page tables of mapped memory before its first use.

Otherwise each page of 4 KiB costs a fault of 1 to 3 microseconds.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable

from baton.own_memory import madvise
from baton.transports.base import ByteArray

_MADV_POPULATE_WRITE = 23
PIECE_BYTES = 4 << 20
# Seconds of a pause before each piece, in which cores may be idle: the system counts in hundredths.
_PAUSE_S = 0.03
# The most pauses in a row, if no core is idle.
_MOST_PAUSES = 30
_madvise = madvise()


def populate(memory: ByteArray) -> bool:
    """False if the system does not support it."""
    address = memory.ctypes.data
    start = address - address % mmap.PAGESIZE
    return _madvise(start, address + memory.nbytes - start, _MADV_POPULATE_WRITE) == 0


def idle_s() -> float:
    """Idle seconds of all cores since boot. If the system does not tell, one core counts as always idle."""
    try:
        with open("/proc/uptime") as file:
            return float(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return time.monotonic()


def populate_beside(
    memory: ByteArray,
    post: Callable[[Callable[[], object]], None],
    sleep: Callable[[float], object] = time.sleep,
    idle: Callable[[], float] = idle_s,
) -> None:
    """`populate` in pieces, each a job for `post`, while a core is idle. Does not keep `memory` mapped."""
    mapped = weakref.ref(memory)

    def piece(start: int, pauses: int) -> None:
        before = idle()
        sleep(_PAUSE_S)
        if (whole := mapped()) is None:
            return
        if pauses < _MOST_PAUSES and idle() - before < _PAUSE_S / 2:
            post(lambda: piece(start, pauses + 1))
        elif populate(whole[start : start + PIECE_BYTES]) and start + PIECE_BYTES < whole.nbytes:
            post(lambda: piece(start + PIECE_BYTES, 0))

    post(lambda: piece(0, 0))
