"""This process's memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Advise = Callable[[int, int, int], int]  # address, bytes, advice


def madvise() -> Advise:
    """Releases the GIL, unlike `mmap.madvise`."""
    advise: Advise = (call := ctypes.CDLL(None).madvise)
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


@dataclass(frozen=True, slots=True)
class Mapping:
    """`file`: a path, a name in brackets, or empty."""

    start: int
    stop: int
    mode: str
    offset: int
    inode: int
    file: str


def own_mappings() -> list[Mapping]:
    """Raises `OSError`."""
    return mappings_in(os.fsdecode(Path("/proc/self/maps").read_bytes()))


def mappings_in(maps: str) -> list[Mapping]:
    found = []
    for line in maps.split("\n")[:-1]:
        place, mode, offset, _, inode, *file = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in place.split("-"))
        found.append(Mapping(start, stop, mode, int(offset, 16), int(inode), *file or [""]))
    return found
