"""Logging of commands that serve: one line per record on stderr, as text or JSON, with UTC times."""

from __future__ import annotations

import calendar
import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from baton.cli.log_stream import LogStream
from baton.deployment import FLAG_VARIABLES, LogLine

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
_DATE = "%Y-%m-%dT%H:%M:%S"
logger = logging.getLogger("baton")


def _time_of(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@functools.lru_cache(1)
def _second(since_1970: int) -> str:
    return time.strftime(_DATE, time.gmtime(since_1970))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time_of(record)} {record.levelname} {record.name}: "
        return "\n".join([head + line for line in super().format(record).splitlines() or [""]])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def log_to_stderr(level: LogLevel = "info", form: LogFormat = "text") -> None:
    """Log Baton's records from `level`, warnings of libraries and of Python, and uncaught exceptions."""
    handler = LogStream(sys.stderr)
    # Shown in no line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    if form == "json":
        for name in _NO_BARS:
            os.environ.setdefault(name, "1")


def is_logging() -> bool:
    return any(isinstance(handler, LogStream) for handler in logging.getLogger().handlers)


def wants_json(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command line asks for JSON logs, which then also report its own errors."""
    last = environment.get(f"{FLAG_VARIABLES}LOG_FORMAT")
    for argument, following in zip(arguments, [*arguments, None][1:], strict=True):
        if argument == "--log-format":
            last = following
        elif argument.startswith("--log-format="):
            last = argument.partition("=")[2]
    return last == "json"


def log_lines(text: str) -> None:
    for line in text.splitlines():
        logger.info("%s", line)


def pass_on(process: str, said: LogLine) -> None:
    level = logging.getLevelName(said.level)
    own = logging.getLogger(said.logger if said.logger.startswith("baton") else f"baton.{said.logger}")
    if not isinstance(level, int) or not own.isEnabledFor(level):
        return
    record = own.makeRecord(own.name, level, "", 0, "%s: %s", (process, said.message), None)
    if said.time is not None:
        with contextlib.suppress(ValueError):
            record.created = calendar.timegm(time.strptime(said.time[:19], _DATE)) + float(said.time[19:])
            record.msecs = float(said.time[19:]) * 1000
    record.fields = {"process": process, **said.fields}
    own.handle(record)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    # The last line names the exception, for the parent process.
    logger.error("%s", "the process ends by an error that was not expected", exc_info=(kind, error, trace))
