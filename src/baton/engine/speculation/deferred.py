"""Drafter rows that wait while their requests get no drafts.

With k "auto", the executor keeps the target's features of requests without drafts, and one pass computes the rows of
several steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from baton.engine.planning import DraftRows
from baton.engine.request import Request, RequestStatus

# The most steps whose rows wait. A pass costs as much as tens of rows. Rows that wait when their request ends enter no
# prefix cache.
MOST_STEPS = 16
# The most rows of these steps, including those of prompts.
MOST_ROWS = 1024


class DeferredRows:
    """`needs_features` false: rows come again until they are computed."""

    def __init__(self, needs_features: bool = True) -> None:
        self._needs_features = needs_features
        self._step = 0
        self._num_rows: dict[int, int] = {}  # of the steps whose features are kept
        self._waiting: dict[Request, DraftRows] = {}
        # Rows of the last steps, all with the same requests, that are not in `_waiting` yet.
        self._later: list[Sequence[DraftRows]] = []
        self._requests: list[Request] = []
        self._oldest = 0

    def begin(self, num_rows: int) -> tuple[int, int]:
        """The new step's number, from 1, and the first whose features are needed; else 0."""
        if not self._needs_features:
            return 0, 0
        self._step += 1
        if not self._later:
            self._waiting = {request: rows for request, rows in self._waiting.items() if _is_needed(rows)}
            self._oldest = min((rows.features[0].step for rows in self._waiting.values()), default=self._step)
            self._num_rows = {step: count for step, count in self._num_rows.items() if step >= self._oldest}
        self._num_rows[self._step] = num_rows
        return self._step, self._oldest

    def due(self, draft_rows: Sequence[DraftRows]) -> list[DraftRows]:
        """The rows to compute now: those of requests with drafts and of prompts, which caches and handoffs want; all
        that wait once one has waited long or too much is kept."""
        if not self._needs_features:
            everything = any(rows.stop - rows.start >= MOST_STEPS for rows in draft_rows)
            return [rows for rows in draft_rows if everything or _cannot_wait(rows)]
        everything = self._step - self._oldest >= MOST_STEPS - 1 or sum(self._num_rows.values()) > MOST_ROWS
        before, self._requests = self._requests, [rows.request for rows in draft_rows]
        if not everything and self._requests == before and not any(map(_cannot_wait, draft_rows)):
            self._later.append(draft_rows)
            return []
        for rows in itertools.chain(*self._later, draft_rows):
            self._waiting[rows.request] = self._joined(rows)
        self._later, new = [], set(self._requests)
        due = [
            rows
            for rows in self._waiting.values()
            if (rows.request in new or _is_needed(rows)) and (everything or _cannot_wait(rows))
        ]
        for rows in due:
            del self._waiting[rows.request]
        return due

    def _joined(self, rows: DraftRows) -> DraftRows:
        before = self._waiting.pop(rows.request, None)
        if before is None or (before.start, before.stop) != (rows.request.num_drafted, rows.start):
            return rows
        return DraftRows(rows.request, (*before.features, *rows.features), before.start, rows.stop, rows.num_drafts)


def _cannot_wait(rows: DraftRows) -> bool:
    return rows.num_drafts > 0 or rows.start < rows.request.prefill_len


def _is_needed(rows: DraftRows) -> bool:
    """A preempted request starts over."""
    request = rows.request
    known = (request.num_drafted, request.num_computed) == (rows.start, rows.stop)
    return known and request.status is RequestStatus.RUNNING and request.finish_reason is None
