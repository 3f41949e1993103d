"""Drafter rows (`DeferredRows`) of ended requests, computed outside of steps: when the engine is idle, or for a prompt
that continues. Until then requests keep their pages. If these or memory become short, the last blocks enter no prefix
cache, unless prompts continued answers lately.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.engine.planning import DraftRows
from baton.engine.request import Request
from baton.engine.speculation.deferred import DeferredRows
from baton.engine.step import StepRunner
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

# Ended requests after a prompt that continued one: computing their rows costs a hundredth of recomputing them.
REUSED = 64


class LateRows:
    def __init__(self, deferred: DeferredRows, steps: StepRunner) -> None:
        self._deferred, self._steps, self._scheduler = deferred, steps, steps.scheduler
        self._cache = self._scheduler.cache
        self._num_reused = 0
        self._scheduler.before_preemption = self._before_preemption

    def keep(self, request: Request) -> bool:
        """Whether an ended request keeps its pages."""
        self._num_reused = max(0, self._num_reused - 1)
        rows = self._take(request) if self._deferred.is_unbounded else None
        if rows is None:
            return False
        self._deferred.ended[request] = rows
        return True

    def find(self, request: Request) -> None:
        """Compute what a new request continues, before it looks for its prefix."""
        tokens = request.token_ids
        if not self._cache.lacks_draft(request.kv, tokens, request.prefill_len):
            return
        self._num_reused = REUSED
        ends = {one: rows.start + 2 for one, rows in self._deferred.ended.items()}
        self._release([one for one, end in ends.items() if one.token_ids[:end] == tokens[:end]], True)

    def relieve(self) -> None:
        """After rows are scheduled."""
        if self._deferred.ended and (self._deferred.keeps_too_much or self._is_short()):
            self._release(self._first(), self._num_reused > 0)

    def compute(self) -> bool:
        """Some, in an idle engine. False if none wait."""
        some = self._first()
        self._release(some, True)
        return bool(some)

    def _is_short(self) -> bool:
        scheduler = self._scheduler
        waits = bool(scheduler.waiting or scheduler.receive_queue) and scheduler.has_room
        return waits or any(2 * pool.num_available < pool.num_pages for pool in self._cache.pools.values())

    def _first(self) -> list[Request]:
        some: list[Request] = []
        num_rows = 0
        for request, rows in self._deferred.ended.items():
            if num_rows < self._deferred.rows_of_pass:
                some.append(request)
                num_rows += rows.stop - rows.start
        return some

    def _release(self, requests: Sequence[Request], computes: bool) -> None:
        found = [self._deferred.take(request) for request in requests]
        if computes:
            self._compute([rows for rows in found if rows is not None])
        for request in requests:
            self._scheduler.release(request)

    def _before_preemption(self, request: Request) -> None:
        rows = self._take(request)
        if rows is not None:
            self._compute([rows])

    def _take(self, request: Request) -> DraftRows | None:
        caches = all(pool.enable_caching for pool in self._cache.pools.values()) and not request.kv.uncached
        return self._deferred.take(request) if caches else None

    def _compute(self, found: list[DraftRows]) -> None:
        if not found:
            return
        try:
            self._steps.draft_late(found)
        except Exception as error:
            log.warning("late drafter rows of %d requests failed: %r", len(found), error)
            return
        for rows in found:
            request = rows.request
            request.num_drafted = rows.stop
            self._cache.advance(request.kv, request.token_ids, request.num_computed, request.num_drafted)
