"""The stderr of a child process: written to a file, parsed by line and forwarded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ([A-Z]+) ([\w.]+): (.*)")
# The parent's line, which quotes it, has one too.
_CODE = re.compile(r" \[[a-z_]+\]\Z")
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class LogLine:
    """A library's output is a warning without `time`. `time`: ISO 8601 in UTC, without the Z. `fields`: other fields of
    a JSON line."""

    message: str
    level: str = "WARNING"
    logger: str = "stderr"
    time: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_last_word(self) -> bool:
        """The error that ends a command; the parent quotes it."""
        return self.level == "ERROR" and self.logger == "baton"


def read_line(line: str) -> LogLine:
    """Parse either format of `cli.logs`."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError, KeyError, AttributeError, RecursionError):
            fields = json.loads(line)
            said = [fields.pop(name) for name in ("message", "level", "logger", "time")]
            if all(isinstance(text, str) for text in said):
                message, level, logger, time = said
                return LogLine(message, level.upper(), logger, time.removesuffix("Z"), fields)
    if match := _LINE.fullmatch(line):
        return LogLine(match[4], match[2], match[3], match[1])
    return LogLine(line)


Forward = Callable[[LogLine], None]


class ChildLog:
    """The log of one child. A thread calls `forward` with each line except the child's final error."""

    def __init__(self, path: Path, forward: Forward | None = None) -> None:
        self.path = path
        self._forward = forward
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def writing(self) -> Any:
        """Raises `OSError`."""
        with self.path.open("ab") as file:
            if self._forward is None:
                yield file.fileno()
                return
        read, write = os.pipe()
        thread = threading.Thread(target=self._pass_on, args=(read,), daemon=True, name="baton-child-log")
        try:
            try:
                thread.start()
            except RuntimeError as error:
                os.close(read)
                raise OSError(errno.EAGAIN, str(error)) from None
            self._thread = thread
            yield write
        finally:
            os.close(write)

    def _pass_on(self, read: int) -> None:
        assert self._forward is not None
        held: LogLine | None = None
        with os.fdopen(read, "rb") as lines, self.path.open("ab", buffering=0) as kept:
            for data in lines:
                with contextlib.suppress(OSError, ValueError):  # a full disk must not end the child
                    kept.write(data)
                if held is not None:
                    self._forward(held)
                said = read_line(data.decode(errors="replace").rstrip("\n"))
                held = said if said.is_last_word else None
                if held is None and said.message.strip():
                    self._forward(said)

    def text(self) -> str:
        """Complete if the child has ended."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def last_words(self) -> str | None:
        """The last message of a child that has ended, or None if its log is empty."""
        lines = self.text().strip().splitlines()
        if not lines:
            return None
        said = read_line(lines[-1])
        exception = str(said.fields.get("exception", "")).strip().splitlines()
        return exception[-1] if exception else _CODE.sub("", said.message.removeprefix("error: "))
