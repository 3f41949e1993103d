"""The end of a process with its parent's, by the kernel's hand: a parent that is killed can end nobody."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process `by` when its parent dies (prctl(2), PR_SET_PDEATHSIG). Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
