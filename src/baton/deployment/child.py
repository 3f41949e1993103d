"""A child's side of a deployment: what it reports to its parent, and its end when that dies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from baton.parent import die_with_parent


def read_reports(pipe: int, pending: bytes) -> tuple[list[dict[str, Any]] | None, bytes]:
    """The next reports from a child's pipe, behind what was `pending`, and what is pending then; None at its end."""
    data = os.read(pipe, 65536)
    if not data:
        return None, pending
    *lines, pending = (pending + data).split(b"\n")
    return [json.loads(line) for line in lines], pending


class Reporter:
    """A child's end of its pipe; without a pipe, progress goes to stderr. Made once, before anything slow."""

    def __init__(self, ready_fd: int | None) -> None:
        self._fd = ready_fd
        if ready_fd is not None:
            os.set_inheritable(ready_fd, False)
            die_with_parent()

    def progress(self, text: str) -> None:
        """Tell what start-up does now."""
        if self._fd is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._write({"progress": text})

    def ready(self, url: str, kv: str = "", urls: Sequence[str] = ()) -> None:
        """Tell that requests are served at `url`, by an engine with so much KV; with data-parallel ranks at `urls`, the
        first of them `url`."""
        if self._fd is not None:
            self._write({"ready": url, "kv": kv, "urls": list(urls) or [url]})

    def _write(self, report: dict[str, object]) -> None:
        assert self._fd is not None
        os.write(self._fd, json.dumps(report).encode() + b"\n")
