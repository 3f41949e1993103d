"""The event loop of a router's process, and time limits."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["new_event_loop", "run", "timeout"]

# It costs less CPU than asyncio's own.
try:
    import uvloop
except ImportError:  # not built for this platform
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:

    class _Loop(uvloop.Loop):
        """uvloop's own clock has milliseconds and stands still during an iteration."""

        time = staticmethod(time.monotonic)

    new_event_loop = _Loop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(main)
    return asyncio.run(main)
