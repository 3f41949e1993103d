"""Watches the agent's thread: an agent that hangs cannot report that itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton.clock import Clock, SystemClock

log = logging.getLogger(__name__)


class ThreadWatch:
    """Calls `on_lost` once, with the cause, if `thread` has ended or has completed no loop for `limit_s` seconds.

    `last_step`: when its last loop began, by `clock`. If the whole process was asleep, the limit restarts. `on_lost` is
    called on a thread of the watch, and must not wait for `thread`.
    """

    def __init__(
        self,
        thread: threading.Thread,
        last_step: Callable[[], float],
        limit_s: float,
        on_lost: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._watched, self._last_step, self._limit_s, self._on_lost = thread, last_step, limit_s, on_lost
        self._clock = clock or SystemClock()
        self._every_s = limit_s / 8
        self._looked = self._since = self._clock.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{thread.name}-watch", daemon=True)
        self.lost: str | None = None

    def start(self) -> None:
        """The watched thread must have been started."""
        self._since = self._clock.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Thread-safe."""
        self._closing.set()

    def check(self) -> str | None:
        """Why the thread is lost, or None."""
        now, before = self._clock.monotonic(), self._looked
        self._looked = now
        if now - before > 4 * self._every_s:
            self._since = now
        if not self._watched.is_alive():
            return "its thread has ended"
        idle = now - max(self._since, self._last_step())
        return f"its thread has done nothing for {idle:.0f} s" if idle > self._limit_s else None

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            why = self.check()
            if why is not None and not self._closing.is_set():
                self.lost = why
                log.critical("the handoff agent is lost: %s", why)
                self._on_lost(why)
                return
