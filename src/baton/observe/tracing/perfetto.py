"""Spans as a timeline for https://ui.perfetto.dev, in the Chrome trace event format."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import IO, Any

from baton.errors import ConfigError
from baton.observe.tracing.span import Span

logger = logging.getLogger(__name__)


class PerfettoFile:
    """Router and engines are shown as processes, and each request as a thread in each, so both sides of a handoff have
    one clock.

    Raises `ConfigError`. A later failure is logged, and ends the writing.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file: IO[str] | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError("trace", f"cannot be written: {error}") from None
        self._processes: dict[str, int] = {}
        self._threads: dict[str, int] = {}
        self._lines = 0

    def export(self, span: Span) -> None:
        process = self._process(span.process)
        thread = self._threads.setdefault(span.request_id, len(self._threads) + 1)
        args = {**span.attributes, "trace_id": f"{span.trace_id:032x}", **({"error": span.error} if span.error else {})}
        common = {"pid": process, "tid": thread, "cat": "baton"}
        start, duration = span.start / 1e3, max(span.end - span.start, 0) / 1e3
        self._write({"ph": "X", "name": span.name, "ts": start, "dur": duration, "args": args, **common})
        for event in span.events:
            mark = {"ph": "i", "s": "t", "name": event.name, "ts": event.at / 1e3, "args": event.attributes}
            self._write({**mark, **common})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                with file:
                    file.write("\n]\n" if self._lines else "[]\n")
            except OSError as error:
                _log(error)

    def _process(self, name: str) -> int:
        if name not in self._processes:
            self._processes[name] = len(self._processes) + 1
            self._write({"ph": "M", "name": "process_name", "pid": self._processes[name], "args": {"name": name}})
        return self._processes[name]

    def _write(self, event: dict[str, Any]) -> None:
        if (file := self._file) is None:
            return
        try:
            file.write(("[\n" if not self._lines else ",\n") + json.dumps(event))
            file.flush()
        except OSError as error:
            _log(error)
            self._file = None
            with contextlib.suppress(OSError):
                file.close()
        self._lines += 1


def _log(error: OSError) -> None:
    logger.error("the trace file cannot be written any more: %s", error)
