"""A child process's side of a deployment: it reports to its parent, and ends when the parent dies.

A report is a line of JSON: `{"progress": text}` while it starts, repeated with `"again"`; `{"refused": field, "why":
text}` for a bad setting, `{"ready": url}` once it serves, `{"signalled": true}` when it ends because of a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.children import die_with_parent
from baton.errors import ConfigError

_AGAIN_S = 10.0
_MOST_CHARS = 2000


def read_reports(pipe: int, pending: bytes) -> tuple[list[dict[str, Any]] | None, bytes]:
    """Read reports after the incomplete line `pending`. Returns them (None at the end of the pipe) and the new
    incomplete line."""
    data = os.read(pipe, 65536)
    if not data:
        return None, pending
    *lines, pending = (pending + data).split(b"\n")
    return [json.loads(line) for line in lines], pending


def read_rest(pipe: int, pending: bytes) -> list[dict[str, Any]]:
    """Read the reports of a child that has ended. Does not wait for a process that still holds the pipe."""
    parsed: list[dict[str, Any]] = []
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            reports, pending = read_reports(pipe, pending)
            if reports is None:
                break
            parsed += reports
    return parsed


class Reporter:
    """Reports start-up steps to the parent, or without a pipe to `on_progress`; long ones every `_AGAIN_S` seconds. As
    a context manager it also reports the `ConfigError` of a failed start.
    """

    def __init__(self, ready_fd: int | None, on_progress: Callable[[str], None]) -> None:
        self._fd = ready_fd
        self._on_progress = on_progress
        self._step, self._began, self._repeats = "", 0.0, False
        self._ready = threading.Event()
        if ready_fd is not None:
            os.set_inheritable(ready_fd, False)
            die_with_parent(pipe=ready_fd)

    def progress(self, text: str) -> None:
        """A step begins; with an empty text, it shows its own progress."""
        if not self._repeats:
            threading.Thread(target=self._again, daemon=True, name="baton-progress").start()
        self._repeats, self._step, self._began = True, text, time.monotonic()
        if text:
            self._report(text)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ready.set()
        if isinstance(error, ConfigError) and self._fd is not None:
            with contextlib.suppress(OSError):  # the parent is gone
                self._write({"refused": error.field, "why": error.message[:_MOST_CHARS]})

    def _again(self) -> None:
        while not self._ready.wait(_AGAIN_S):
            took = time.monotonic() - self._began
            if self._step and took >= _AGAIN_S:
                self._report(f"{self._step}: {took:.0f} s so far", again=True)

    def _report(self, text: str, **more: bool) -> None:
        if self._fd is None:
            self._on_progress(text)
        else:
            with contextlib.suppress(OSError):
                self._write({"progress": text, **more})

    def ready(self, url: str, kv: str = "", urls: Sequence[str] = ()) -> None:
        """`kv`: the KV capacity, as text. `urls`: of all data-parallel ranks, `url` first."""
        self._ready.set()
        if self._fd is not None:
            self._write({"ready": url, "kv": kv, "urls": list(urls) or [url]})

    def signalled(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._write({"signalled": True})

    def _write(self, report: dict[str, object]) -> None:
        assert self._fd is not None
        os.write(self._fd, json.dumps(report).encode() + b"\n")
