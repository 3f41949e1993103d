"""Die with the parent (PR_SET_PDEATHSIG): a parent that is killed cannot end its children."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(by: signal.Signals = signal.SIGTERM, pipe: int | None = None) -> None:
    """Have the kernel send this process `by` when its parent dies. Linux only.

    `pipe`: only the parent has its other end; tells of a death before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if pipe is not None:
        poll = select.poll()
        poll.register(pipe, 0)
        if poll.poll(0):
            os.kill(os.getpid(), by)
