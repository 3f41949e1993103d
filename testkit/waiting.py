"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(holds: Callable[[], object]) -> None:
    """Wait until a condition holds. Fails after 60 seconds, since other tests may use all cores."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
