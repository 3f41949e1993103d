"""Memory in huge pages (Linux): other pages are read after a walk of page tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from baton.own_memory import Advise, Mapping, madvise, own_mappings

log = logging.getLogger(__name__)
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
# Seconds of CPU time for moving pages, about a millisecond each; the kernel moves the rest later.
_MOST_S = 1.0
# Pages per call: before each, every CPU releases its new pages.
_MOST_PAGES = 32


def move_heap() -> None:
    """Move this process's present heap, except for its edges."""
    try:
        mappings = own_mappings()
    except OSError:
        return
    move(
        "the heap",
        lambda size: [page for start, end in heap_in(mappings) for page in range(-(-start // size), end // size)],
    )


def move(what: str, pages_for: Callable[[int], Sequence[int]]) -> None:
    """Move pages of `what`, if the system has huge ones. `pages_for`: their numbers, by the size of one in bytes."""
    size = size_in(HUGE_PAGE_SIZE)
    if size is not None:
        pages = pages_for(size)
        log.debug("%d of %d huge pages for %s", collapse(pages, size, madvise()), len(pages), what)


def heap_in(mappings: Iterable[Mapping]) -> Iterator[tuple[int, int]]:
    """(start, end) of private memory without a file."""
    for one in mappings:
        if one.mode == "rw-p" and one.inode == 0 and one.file in ("", "[heap]"):
            yield one.start, one.stop


def size_in(file: Path) -> int | None:
    """None without huge pages, or if /sys is hidden."""
    try:
        return int(file.read_text()) or None
    except (OSError, ValueError):
        return None


def pages_of(ranges: Iterable[tuple[int, int]], size: int) -> list[int]:
    """The numbers of the pages of `size` bytes that hold a byte of (address, bytes), ascending."""
    return sorted({page for start, count in ranges for page in range(start // size, -(-(start + count) // size))})


def collapse(pages: Sequence[int], size: int, advise: Advise, clock: Callable[[], float] = time.thread_time) -> int:
    """How many were moved. A run that fails is halved: its edge may be outside of the memory."""
    started, num_moved, runs = clock(), 0, runs_of(pages)
    for first, count in runs:
        advise(first * size, count * size, _MADV_HUGEPAGE)
    runs.reverse()
    while runs and clock() - started <= _MOST_S:
        first, count = runs.pop()
        if advise(first * size, count * size, _MADV_COLLAPSE) == 0:
            num_moved += count
        elif half := count // 2:
            runs += [(first + half, count - half), (first, half)]
    return num_moved


def runs_of(pages: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of neighbours among ascending pages."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        first, count = runs[-1] if runs else (page, 0)
        if page == first + count and 0 < count < _MOST_PAGES:
            runs[-1] = first, count + 1
        else:
            runs.append((page, 1))
    return runs
