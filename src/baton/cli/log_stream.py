"""Logging to a pipe: requests must not wait for its reader."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import stat
import threading
from collections import deque
from typing import TextIO
from weakref import WeakSet

_MAX_PENDING = 1000
_CLOSE_S = 2.0


class LogStream(logging.StreamHandler[TextIO]):
    """A thread writes lines that find a full pipe. Beyond `_MAX_PENDING` lines are dropped until all are written; the
    next one says how many."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._pending: deque[str] = deque()
        self._rest = b""  # of the line being written
        self._num_dropped = 0
        self._thread: threading.Thread | None = None
        self._pipe = _opened_again(stream)
        _STREAMS.add(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._waits:
                self._note_dropped()
            if self._num_dropped or len(self._pending) >= _MAX_PENDING:
                self._num_dropped += 1
            else:
                self._append(record)
            if self._thread is not None and self._thread.is_alive():
                return
            self._write(0.0)
            if self._waits:
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
            self._forget()
            pipe, self._pipe = self._pipe, None
            if pipe is not None:
                os.close(pipe)
            self.release()
        super().close()

    def after_fork(self) -> None:
        """The parent writes its pending lines."""
        self._forget()
        self._thread = None

    def _forget(self) -> None:
        self._pending.clear()
        self._rest, self._num_dropped = b"", 0

    def _append(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # `handleError` would wait for a reader
            given = repr(record.msg), error
            text = self.format(
                logging.LogRecord(record.name, logging.ERROR, "", 0, "%s cannot be logged: %s", given, None)
            )
        self._pending.append(text + self.terminator)

    def _note_dropped(self) -> None:
        dropped, self._num_dropped = self._num_dropped, 0
        if dropped:
            what = "%d lines of this log were dropped, since nobody read them"
            self._append(logging.LogRecord("baton", logging.WARNING, "", 0, what, (dropped,), None))

    @property
    def _waits(self) -> bool:
        return bool(self._pending or self._rest)

    def _write(self, wait_s: float) -> None:
        while self._waits and self.has_room(wait_s):
            if not self._rest:
                text = self._pending.popleft()
                self._rest = text.encode(self.stream.encoding or "utf-8", self.stream.errors or "backslashreplace")
            # A writable pipe takes PIPE_BUF bytes at once.
            with contextlib.suppress(BlockingIOError):
                self._rest = self._rest[self._put(self._rest[: select.PIPE_BUF]) :]
            if not self._waits:
                self._note_dropped()

    def _put(self, data: bytes) -> int:
        """Returns how many bytes are written."""
        if self._pipe is not None:
            return os.write(self._pipe, data)
        try:
            return os.write(self.stream.fileno(), data)
        except io.UnsupportedOperation:
            self.stream.write(self._rest.decode(self.stream.encoding or "utf-8"))
            self.stream.flush()
            return len(self._rest)

    def _write_later(self) -> None:
        while True:
            try:
                self.has_room(None)
                self.acquire()
                try:
                    self._write(0.0)
                    if not self._waits:
                        self._thread = None
                        return
                finally:
                    self.release()
            except (OSError, ValueError):
                return

    def has_room(self, timeout_s: float | None) -> bool:
        try:
            return bool(select.select((), (self.stream,), (), timeout_s)[1])
        except OSError:  # a stream without a descriptor
            return True


_STREAMS: WeakSet[LogStream] = WeakSet()
_HELD: list[LogStream] = []  # during a fork


def _opened_again(stream: TextIO) -> int | None:
    """A pipe with a non-blocking description of its own: the stream's is shared with other processes."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    return None


def _before_fork() -> None:
    """No thread may be writing."""
    _HELD.extend(_STREAMS)
    for stream in _HELD:
        stream.acquire()


def _after_fork() -> None:
    while _HELD:
        _HELD.pop().release()


def _after_fork_in_child() -> None:
    """`logging` makes new locks."""
    while _HELD:
        _HELD.pop().after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
