"""How a command that serves logs: one line for each record on stderr, as text or as JSON, with its time in UTC."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class _Json(logging.Formatter):
    """A record as one JSON object; the `fields` of a record stand beside its message."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "time": self.formatTime(record, self.datefmt) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def log_to_stderr(level: LogLevel = "info", form: LogFormat = "text") -> None:
    """Log what Baton says from `level` on, and warnings of libraries."""
    text = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
    formatter = _Json() if form == "json" else logging.Formatter(text)
    formatter.datefmt, formatter.converter = "%Y-%m-%dT%H:%M:%S", time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("baton").setLevel(level.upper())
