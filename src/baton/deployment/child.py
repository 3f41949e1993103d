"""A child's side of a deployment: what it reports to its parent, and its end when that dies."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.parent import die_with_parent

_AGAIN_S = 10.0


def read_reports(pipe: int, pending: bytes) -> tuple[list[dict[str, Any]] | None, bytes]:
    """The next reports from a child's pipe, behind what was `pending`, and what is pending then; None at its end."""
    data = os.read(pipe, 65536)
    if not data:
        return None, pending
    *lines, pending = (pending + data).split(b"\n")
    return [json.loads(line) for line in lines], pending


class Reporter:
    """A child's end of its pipe; without a pipe, `tell` gets what start-up does. Made once, before anything slow.

    A step of the start that takes long is told again every `_AGAIN_S` seconds, with the time that it has taken, until
    `ready`, or `close`, which ends what failed.
    """

    def __init__(self, ready_fd: int | None, tell: Callable[[str], None]) -> None:
        self._fd = ready_fd
        self._tell = tell
        self._step, self._began = "", 0.0
        self._ready = threading.Event()
        if ready_fd is not None:
            os.set_inheritable(ready_fd, False)
            die_with_parent()

    def progress(self, text: str) -> None:
        """Tell what start-up does now."""
        if not self._step:
            threading.Thread(target=self._again, daemon=True, name="baton-progress").start()
        self._step, self._began = text, time.monotonic()
        self._say(text)

    def close(self) -> None:
        """Tell nothing more."""
        self._ready.set()

    def _again(self) -> None:
        while not self._ready.wait(_AGAIN_S):
            took = time.monotonic() - self._began
            if took >= _AGAIN_S:
                self._say(f"{self._step}: {took:.0f} s so far")

    def _say(self, text: str) -> None:
        if self._fd is None:
            self._tell(text)
        else:
            with contextlib.suppress(OSError):  # the parent's end says enough
                self._write({"progress": text})

    def ready(self, url: str, kv: str = "", urls: Sequence[str] = ()) -> None:
        """Tell that requests are served at `url`, by an engine with so much KV; with data-parallel ranks at `urls`, the
        first of them `url`."""
        self._ready.set()
        if self._fd is not None:
            self._write({"ready": url, "kv": kv, "urls": list(urls) or [url]})

    def _write(self, report: dict[str, object]) -> None:
        assert self._fd is not None
        os.write(self._fd, json.dumps(report).encode() + b"\n")
