"""Shows how much of a checkpoint is loaded: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from baton.models.loading.filling import watch_tensors

_EVERY_S = 3.0
_BAR = "Loading safetensors checkpoint"  # vLLM's words


@contextmanager
def show_loading(step: str, progress: Callable[[str], None], shows: bool = True) -> Iterator[None]:
    """Report a step that loads weights, and show its progress unless it is short.

    `shows` false: only report the step, for ranks that load at the same time. While the bar is shown, `progress` gets
    an empty text.
    """
    progress(step)
    if not shows:
        yield
    elif _has_bar():
        with tqdm(desc=_BAR, unit="B", unit_scale=True, delay=_EVERY_S, leave=False) as bar:

            def draw(read: int, total: int) -> None:
                bar.total = total
                bar.update(read - bar.n)

            progress("")
            with watch_tensors(draw):
                yield
    else:
        with watch_tensors(_Lines(step, progress).watch):
            yield


def _has_bar() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")


class _Lines:
    def __init__(self, step: str, progress: Callable[[str], None]) -> None:
        self._step, self._progress = step, progress
        self._began = self._reported = time.monotonic()

    def watch(self, read: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported < _EVERY_S or read == total:
            return
        self._reported = now
        size = f"{read / 2**30:.1f} of {total / 2**30:.1f} GiB"
        self._progress(f"{self._step}: {read / total:.0%}, {size}, {now - self._began:.0f} s")
