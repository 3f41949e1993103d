"""Checks for what a test must not leave behind."""

from __future__ import annotations

import time
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


def _orphans() -> set[Path]:
    segments = Path("/dev/shm").glob("baton-*")
    return {path for path in segments if not Path("/proc", path.name.split("-")[1]).exists()}
