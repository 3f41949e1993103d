"""Drafter rows that wait while their requests get no drafts (k "auto"). The executor keeps the target's features."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.planning import DraftRows, FeatureRows
from baton.engine.request import Request, RequestStatus

# The most steps whose rows wait if late entries keep a window's pages, or are a whole model's.
MOST_STEPS = 16
# The most rows of the kept steps, and of earlier steps in one pass.
MOST_ROWS, ROWS_OF_PASS = 4096, 1024


class DeferredRows:
    """`needs_features` false: rows come again until they are computed. `most_steps`: None is no bound."""

    most_rows, rows_of_pass = MOST_ROWS, ROWS_OF_PASS

    def __init__(self, needs_features: bool = True, most_steps: int | None = MOST_STEPS) -> None:
        self._needs_features, self._most_steps = needs_features, most_steps
        self._step = self._oldest = 0
        self._num_rows: dict[int, int] = {}  # of the steps whose features are kept
        self._kept = 0  # their sum
        self._waiting: dict[Request, DraftRows] = {}
        self.ended: dict[Request, DraftRows] = {}  # of requests that `LateRows` keeps
        # The last steps, with a row of each request, that are not in `_waiting` yet: requests with their first row's
        # position, first step, and number.
        self._even: tuple[list[tuple[Request, int]], int, int] = [], 0, 0

    @property
    def is_unbounded(self) -> bool:
        return self._needs_features and self._most_steps is None

    @property
    def _computes_all(self) -> bool:
        """Ended requests' rows go first."""
        return self.keeps_too_much and not self.ended

    @property
    def keeps_too_much(self) -> bool:
        return self._kept > self.most_rows or (
            self._most_steps is not None and self._step - self._oldest >= self._most_steps - 1
        )

    def begin(self, num_rows: int) -> tuple[int, int]:
        """The new step's number, from 1, and the first whose features are needed; else 0."""
        if not self._needs_features:
            return 0, 0
        self._step += 1
        if not self._even[2]:
            self._waiting = {request: rows for request, rows in self._waiting.items() if _is_needed(rows)}
            waiting = (*self._waiting.values(), *self.ended.values())
            self._oldest = min((rows.features[0].step for rows in waiting), default=self._step)
            self._num_rows = {step: count for step, count in self._num_rows.items() if step >= self._oldest}
            self._kept = sum(self._num_rows.values())
        self._num_rows[self._step] = num_rows
        self._kept += num_rows
        return self._step, self._oldest

    def wait(self, requests: list[Request]) -> bool:
        """Whether this step's rows wait: one of each request, before they advance."""
        even, first, count = self._even
        if not self._needs_features or self._computes_all:
            return False
        if not count:
            even, first = [(request, request.num_computed) for request in requests], self._step
        elif self._step != first + count or [request for request, _ in even] != requests:
            return False
        self._even = even, first, count + 1
        return True

    def due(self, draft_rows: Sequence[DraftRows]) -> list[DraftRows]:
        """The rows to compute now: those of prompts, which caches and handoffs want, and of requests with drafts, which
        wait if a pass would have too many; all once one has waited long or too much is kept."""
        if not self._needs_features:
            everything = any(rows.stop - rows.start >= MOST_STEPS for rows in draft_rows)
            return [rows for rows in draft_rows if everything or _cannot_wait(rows)]
        self._flatten()
        for rows in draft_rows:
            self._add(rows)
        everything, new, room = self._computes_all, {rows.request for rows in draft_rows}, self.rows_of_pass
        due = []
        for rows in self._waiting.values():
            if not (everything or _cannot_wait(rows)) or not (rows.request in new or _is_needed(rows)):
                continue
            num_late = rows.stop - rows.start if rows.features[0].step < self._step else 0
            if num_late and room <= 0 and not _is_of_prompt(rows):
                continue
            room -= num_late
            due.append(rows)
        for rows in due:
            del self._waiting[rows.request]
        return due

    def take(self, request: Request) -> DraftRows | None:
        """What waits of a request, without drafts."""
        self._flatten()
        rows = self.ended.pop(request, None) or self._waiting.pop(request, None)
        return rows._replace(num_drafts=0) if rows is not None and rows.start == request.num_drafted else None

    def _flatten(self) -> None:
        (requests, first, count), self._even = self._even, ([], 0, 0)
        for index, (request, start) in enumerate(requests):
            features = tuple(FeatureRows(step, index, 1) for step in range(first, first + count))
            self._add(DraftRows(request, features, start, start + count, 0))

    def _add(self, rows: DraftRows) -> None:
        before = self._waiting.pop(rows.request, None)  # the order is the batch's
        if before is not None and (before.start, before.stop) == (rows.request.num_drafted, rows.start):
            rows = DraftRows(rows.request, (*before.features, *rows.features), before.start, rows.stop, rows.num_drafts)
        self._waiting[rows.request] = rows


def _is_of_prompt(rows: DraftRows) -> bool:
    return rows.start < rows.request.prefill_len


def _cannot_wait(rows: DraftRows) -> bool:
    return rows.num_drafts > 0 or _is_of_prompt(rows)


def _is_needed(rows: DraftRows) -> bool:
    """A preempted request starts over."""
    request = rows.request
    known = (request.num_drafted, request.num_computed) == (rows.start, rows.stop)
    return known and request.status is RequestStatus.RUNNING and request.finish_reason is None


def catch_up(late: Sequence[tuple[Request, int]], budget: int) -> list[DraftRows]:
    """Rows of requests that lack earlier entries, in order, within the token budget. They get drafts once none is
    missing."""
    rows: list[DraftRows] = []
    for request, num_drafts in late:
        start = request.num_drafted
        stop = min(request.num_computed, start + budget)
        if stop > start:
            none = (FeatureRows(0, 0, stop - start),)
            rows.append(DraftRows(request, none, start, stop, num_drafts if stop == request.num_computed else 0))
            budget -= stop - start
    return rows
