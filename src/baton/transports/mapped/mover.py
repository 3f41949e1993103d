"""A thread for copies, without the GIL."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from baton.kv.geometry import CopyList
from baton.transports.base import ByteArray, Operation
from baton.transports.copying import copy_runs


def copy_now(source: ByteArray, dest: ByteArray, copies: CopyList, operation: Operation) -> None:
    """`operation` ends when the list is copied, or as failed if its flag stopped it."""
    if not operation.start():
        return  # withdrawn while queued
    try:
        ended = copy_runs(source, dest, copies, operation.flags)
    except Exception as error:  # otherwise the operation would never end
        operation.end(f"copy failed: {error}")
        return
    # Ending the operation takes a lock: whoever sees `done`, here or by a message, sees the bytes.
    operation.end(None if ended == len(copies) else f"cancelled after {ended} of {len(copies)} runs")


class Mover:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def submit(self, source: ByteArray, dest: ByteArray, copies: CopyList, operation: Operation) -> None:
        """As `copy_now`, on this thread."""
        self._jobs.put(lambda: copy_now(source, dest, copies, operation))

    def post(self, job: Callable[[], object]) -> None:
        """`job` must not raise. Runs after the queued jobs."""
        self._jobs.put(job)

    def close(self) -> None:
        """Waits for the queued jobs."""
        self._jobs.put(None)
        self._thread.join()
