"""Packed weights in huge pages (Linux).

A step of few rows reads every weight once, with pages of 4 KiB after a walk of page tables.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import nn

from baton.models.layers.linear import Linear

log = logging.getLogger(__name__)
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
# Weights that the caches may hold gain little.
LEAST_BYTES = 32 << 20
# CPU time. A page takes about a millisecond; the kernel does the rest later, little by little.
_MOST_S = 1.0
# Of a call, which first has every CPU release its lists of new pages.
_MOST_PAGES = 32
Advise = Callable[[int, int, int], int]


def use_huge_pages(modules: Iterable[object], least_bytes: int = LEAST_BYTES) -> None:
    """Move the packed weights of these modules into huge pages, as far as the system has them. Changes no byte."""
    linears = {
        layer
        for module in modules
        if isinstance(module, nn.Module)
        for layer in module.modules()
        if isinstance(layer, Linear)
    }
    ranges = sorted(found for layer in linears if (found := _place_of(layer)) is not None)
    size = size_in(HUGE_PAGE_SIZE)
    if size is None or sum(count for _, count in ranges) < least_bytes:
        return
    pages = pages_of(ranges, size)
    num_moved = collapse(pages, size, madvise())
    log.debug("%d of %d huge pages for weights", num_moved, len(pages))


def madvise() -> Advise:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def size_in(file: Path) -> int | None:
    """None without huge pages, or if /sys is hidden."""
    try:
        return int(file.read_text()) or None
    except (OSError, ValueError):
        return None


def _place_of(layer: Linear) -> tuple[int, int] | None:
    """Address and bytes of the packed weight: one per number of int8, which has scales, else two."""
    found = layer.in_place()
    return None if found is None else (found[0], layer.in_features * layer.out_features * (1 if found[1] else 2))


def pages_of(ranges: Iterable[tuple[int, int]], size: int) -> list[int]:
    """The numbers of the pages of `size` bytes that hold a byte of (address, bytes), ascending."""
    return sorted({page for start, count in ranges for page in range(start // size, -(-(start + count) // size))})


def collapse(pages: Sequence[int], size: int, advise: Advise, clock: Callable[[], float] = time.thread_time) -> int:
    """Returns how many were moved by calls without failures."""
    started, num_moved, runs = clock(), 0, runs_of(pages)
    for first, count in runs:
        advise(first * size, count * size, _MADV_HUGEPAGE)
    for first, count in runs:
        if clock() - started > _MOST_S:
            break
        if advise(first * size, count * size, _MADV_COLLAPSE) == 0:
            num_moved += count
    return num_moved


def runs_of(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbours among ascending pages, at most `_MOST_PAGES` together: (first, count)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        first, count = runs[-1] if runs else (page, 0)
        if page == first + count and 0 < count < _MOST_PAGES:
            runs[-1] = first, count + 1
        else:
            runs.append((page, 1))
    return runs
