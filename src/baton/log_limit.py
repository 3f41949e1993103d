"""A rate limit for log lines that peers can cause. Text that a peer chose stays on one line."""

from __future__ import annotations

import logging

LINES_PER_SECOND = 20


class LogLimit(logging.Filter):
    """Passes `lines` records per second, so that no peer can fill the disk. The first record after a pause says how
    many were dropped."""

    def __init__(self, lines: int = LINES_PER_SECOND) -> None:
        super().__init__()
        self.lines = lines
        self._second = 0
        self._passed = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(record.created)
        if second != self._second:
            self._second, self._passed = second, 0
        if self._passed >= self.lines:
            self._left_out += 1
            return False
        self._passed += 1
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        if self._left_out:
            text += f" (and {self._left_out} more that were not logged)"
            self._left_out = 0
        record.msg, record.args = text, None
        return True
