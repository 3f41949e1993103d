"""Die with the parent (PR_SET_PDEATHSIG): a parent that is killed cannot end its children."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process `by` when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
