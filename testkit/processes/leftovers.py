"""Checks for what a test must not leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

LIMIT_S = 60.0


def orphaned_segments() -> list[Path]:
    """Baton's shared memory whose owner is gone.

    Other tests' deployments do not count: if they kill engines, those segments go with the next start or the end of
    that deployment.
    """
    first, deadline = _orphans(), time.monotonic() + LIMIT_S
    while (left := first & _orphans()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return sorted(left)


def open_files(pid: int | str = "self") -> Counter[str]:
    """What a process has open, by what its descriptors point to, e.g. `{"socket:[17]": 1, "/dev/null": 2}`."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since, as the descriptor of this listing is
            found[os.readlink(f"/proc/{pid}/fd/{name}")] += 1
    return found


def files_left_open(before: Counter[str]) -> Counter[str]:
    """What is open beyond `before`, after a while for threads that close files.

    Numbers of open files do not compare: an earlier test's file may be closed by the garbage collector at any moment.
    """
    deadline = time.monotonic() + LIMIT_S
    while (left := open_files() - before) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def _orphans() -> set[Path]:
    segments = Path("/dev/shm").glob("baton-*")
    return {path for path in segments if not Path("/proc", path.name.split("-")[1]).exists()}
