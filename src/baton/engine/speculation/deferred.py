"""Drafter rows that wait while their requests get no drafts.

A drafter that reads the target's features needs a KV entry for every row. With k "auto", the executor keeps the
features of requests without drafts, and one pass computes the rows of several steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.planning import DraftRows
from baton.engine.request import Request, RequestStatus

# Steps whose features are kept. A pass costs as much as tens of rows. Rows that wait at a request's end enter no prefix
# cache.
MOST_STEPS = 16
# Of these steps, prompts' too.
MOST_ROWS = 1024


class DeferredRows:
    def __init__(self) -> None:
        self._step = 0
        self._num_rows: dict[int, int] = {}  # of the steps whose features are kept
        self._waiting: dict[Request, DraftRows] = {}

    def begin(self, num_rows: int) -> tuple[int, int]:
        """The new step's number, from 1, and the first whose features are still needed."""
        # Rows of ended requests are not needed, and a preempted request starts over.
        self._waiting = {
            request: rows
            for request, rows in self._waiting.items()
            if request.status is RequestStatus.RUNNING
            and (request.num_drafted, request.num_computed) == (rows.start, rows.stop)
        }
        self._step += 1
        oldest = min((rows.features[0].step for rows in self._waiting.values()), default=self._step)
        self._num_rows = {step: count for step, count in self._num_rows.items() if step >= oldest}
        self._num_rows[self._step] = num_rows
        return self._step, oldest

    def due(self, draft_rows: Sequence[DraftRows]) -> list[DraftRows]:
        """The rows to compute now: those of requests with drafts and of prompts, which caches and handoffs want; all
        that wait once one has waited long or too much is kept."""
        for rows in draft_rows:
            self._waiting[rows.request] = self._joined(rows)
        oldest = min((rows.features[0].step for rows in self._waiting.values()), default=self._step)
        everything = self._step - oldest >= MOST_STEPS - 1 or sum(self._num_rows.values()) > MOST_ROWS
        due = [
            rows
            for rows in self._waiting.values()
            if rows.request.finish_reason is None
            and (everything or rows.num_drafts or rows.start < rows.request.prefill_len)
        ]
        for rows in due:
            del self._waiting[rows.request]
        return due

    def _joined(self, rows: DraftRows) -> DraftRows:
        before = self._waiting.pop(rows.request, None)
        if before is None or before.stop != rows.start:
            return rows
        return DraftRows(rows.request, (*before.features, *rows.features), before.start, rows.stop, rows.num_drafts)
