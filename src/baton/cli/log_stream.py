"""Logging to a pipe: requests must not wait for its reader."""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from typing import TextIO

# A writable pipe takes PIPE_BUF bytes at once, and a character has up to four.
_CHARS_AT_ONCE = select.PIPE_BUF // 4
_MAX_PENDING = 1000
_CLOSE_S = 2.0


class LogStream(logging.StreamHandler[TextIO]):
    """A thread writes lines that find a full pipe. Beyond `_MAX_PENDING` lines are dropped until all are written; the
    next one says how many."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._pending: deque[str] = deque()
        self._num_dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._num_dropped or len(self._pending) >= _MAX_PENDING:
                self._num_dropped += 1
                return
            self._append(record)
            if self._thread is not None and self._thread.is_alive():
                return
            self._write(0.0)
            if self._pending:
                self._thread = threading.Thread(target=self._write_later, name="baton-log", daemon=True)
                self._thread.start()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Lines unread for two seconds are lost."""
        self.acquire()
        try:
            self._write(_CLOSE_S)
        except (OSError, ValueError):  # closed before
            pass
        finally:
            self._pending.clear()
            self.release()
        super().close()

    def _append(self, record: logging.LogRecord) -> None:
        text = self.format(record) + self.terminator
        self._pending.extend(text[start : start + _CHARS_AT_ONCE] for start in range(0, len(text), _CHARS_AT_ONCE))

    def _write(self, wait_s: float) -> None:
        while self._pending and self._has_room(wait_s):
            self.stream.write(self._pending.popleft())
            self.stream.flush()
            if self._num_dropped and not self._pending:
                what = "%d lines of this log were dropped, since nobody read them"
                dropped, self._num_dropped = self._num_dropped, 0
                self._append(logging.LogRecord("baton", logging.WARNING, "", 0, what, (dropped,), None))

    def _write_later(self) -> None:
        while True:
            try:
                self._has_room(None)
                self.acquire()
                try:
                    self._write(0.0)
                    if not self._pending:
                        self._thread = None
                        return
                finally:
                    self.release()
            except (OSError, ValueError):  # the reader is gone
                return

    def _has_room(self, timeout_s: float | None) -> bool:
        try:
            return bool(select.select((), (self.stream,), (), timeout_s)[1])
        except OSError:  # a stream without a descriptor
            return True
