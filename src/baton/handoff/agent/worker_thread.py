"""A thread for work that would delay the agent's answers to peers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class WorkerThread:
    """Runs jobs one after the other. `start` is thread-safe."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closing = False

    def start(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Waits for the running job, drops the others."""
        self._closing = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing:
            try:
                job()
            except Exception:
                log.exception("a job of the handoff agent failed")
