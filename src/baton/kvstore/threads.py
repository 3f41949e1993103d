"""Executors whose threads run from the start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_executor(threads: int, name: str) -> ThreadPoolExecutor:
    """`submit` would start them otherwise, and raise if the system has no more: then the call stays in the queue, and
    would run after its caller has given it up.

    Raises `RuntimeError`.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
    together = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            executor.submit(together.wait)
        together.wait()
    except RuntimeError:
        together.abort()
        executor.shutdown()
        raise
    return executor
