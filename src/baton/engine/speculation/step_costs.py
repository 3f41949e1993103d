"""Seconds of target and drafter forwards, measured at start and while the engine runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.engine.planning import DraftRows
from baton.engine.scheduler import ScheduledRows
from baton.engine.speculation.cost_model import FewRows, LinearCost
from baton.engine.speculation.draft_choice import IntArray, RoundCosts
from baton.engine.speculation.probe import draft_probe, target_probe

if TYPE_CHECKING:
    from baton.engine.executor import Executor

log = logging.getLogger(__name__)

# Running steps that are measured: the first ones, then each of so many.
_FIRST_STEPS, _MEASURE_EVERY = 64, 5
_FIT_EVERY = 16
# Rows beyond these numbers may cost more.
_KNEES = (8, 16, 24)
# How often few rows are measured, once kernels are loaded; fewer times after so many seconds.
_FEW_TURNS, _FEW_S = 3, 0.5
# (requests, rows of each, tokens before them), and (requests, drafts).
_TARGET_PROBES = (
    (1, 1, 512),
    (8, 1, 0),
    (16, 1, 0),
    (8, 3, 0),
    (8, 4, 0),
    (8, 1, 512),
    (8, 3, 512),
    (32, 1, 0),
    (32, 2, 0),
)
_DRAFT_PROBES = ((1, 0), (1, 1), (1, 4), (8, 0), (8, 1), (8, 4), (32, 1))


class StepCosts:
    """The cost models of one engine, for at most `max_drafts` drafts per request.

    `steps_per_pass`: of rows of requests without drafts; 0: most are never computed.
    """

    def __init__(self, max_drafts: int, steps_per_pass: int = 1) -> None:
        self._max_drafts, self._steps_per_pass = max_drafts, steps_per_pass
        self.target = LinearCost((1.0, 16.0, 8.0, 4096.0, 16384.0, *[16.0] * len(_KNEES)))
        self.drafter = LinearCost((1.0, 16.0, 1.0, 4.0, 16.0))
        self.few_rows = FewRows()
        self._num_steps = 0

    def computed(self, scheduled: Sequence[ScheduledRows], decodes: bool, seconds: float) -> None:
        """Note a target forward. `decodes`: no row is of a prompt; only such steps are measured."""
        self._num_steps += 1
        if self._measures and decodes:
            seconds /= float(self.few_rows.of(sum(rows.num_rows for rows in scheduled)))
            _observe(self.target, target_parts([(rows.num_rows, rows.start) for rows in scheduled]), seconds)

    def drafted(self, draft_rows: Sequence[DraftRows], seconds: float) -> None:
        if self._measures:
            num_rows = sum(rows.stop - rows.start for rows in draft_rows)
            _observe(self.drafter, draft_parts(num_rows, [rows.num_drafts for rows in draft_rows]), seconds)

    @property
    def _measures(self) -> bool:
        return self._num_steps < _FIRST_STEPS or self._num_steps % _MEASURE_EVERY == 0

    def of_round(self, contexts: IntArray) -> RoundCosts:
        """The costs of one round of requests with `contexts` int64 [R] known tokens, by drafts."""
        _, row, _, _, row_context, *beyond = self.target.each()
        _, _, start, depth, draft = self.drafter.each()
        target = self.target.seconds(target_parts([(1, c) for c in contexts.tolist()]))
        entries, steps = self.drafter.seconds(draft_parts(len(contexts), [0])), self._steps_per_pass
        waiting = self.drafter.seconds(draft_parts(steps * len(contexts), [0])) / steps if steps else 0.0
        drafts = np.arange(1 + len(contexts) * self._max_drafts)
        rows = len(contexts) + drafts
        more = sum(cost * np.maximum(rows - knee, 0) for cost, knee in zip(beyond, _KNEES, strict=True))
        line = target + more - more[0] + drafts * max(float(row + row_context * contexts.mean()), 1e-12)
        verified = line * self.few_rows.of(rows)
        return RoundCosts(waiting, start + entries - waiting, float(depth), float(draft), verified)

    def measure(
        self,
        executor: Executor,
        pages: Mapping[str, npt.NDArray[np.int32]],
        limits: Sequence[int],
        now: Callable[[], float],
    ) -> None:
        """Runs over spare `pages`. `limits`: the most requests and rows of a step, and tokens of a request. `now`:
        seconds."""
        most_requests, most_rows, most_tokens = limits
        spec = executor.spec
        started = now()
        slots = (len(pages[name]) for name in (*spec.state_groups, *spec.draft_state_groups))
        most_requests = min((most_requests, *slots))
        self._measure_few_rows(executor, pages, min(most_rows, most_tokens), now)
        found: dict[tuple[int, int, int], float] = {}
        for repeated in range(2):  # the first time, kernels are loaded
            for probe in _TARGET_PROBES:
                requests, rows, context = probe
                if requests > most_requests or requests * rows > most_rows or context + rows > most_tokens:
                    continue
                plan = target_probe(spec, pages, requests, rows, context)
                began = now()
                executor.execute(plan)
                found[probe] = min(now() - began, found.get(probe, math.inf))
                if repeated:
                    shape = float(self.few_rows.of(requests * rows))
                    self.target.observe(target_parts([(rows, context)] * requests), found[probe] / shape)
            for requests, drafts in _DRAFT_PROBES:
                if requests > min(most_requests, most_rows) or 1 + drafts > most_tokens:
                    continue
                if drafts > 1 and spec.draft_state_groups:
                    continue  # needs more slots
                executor.execute(target_probe(spec, pages, requests, 1))
                drafting = draft_probe(spec, pages, requests, drafts)
                began = now()
                executor.draft(drafting)
                if repeated:
                    self.drafter.observe(draft_parts(requests, [drafts] * requests), now() - began)
        for cost in (self.target, self.drafter):
            for _ in range(4):  # each fit stays close to the last
                cost.fit()
        log.info("measured the costs of drafts in %.2f s", now() - started)

    def _measure_few_rows(
        self, executor: Executor, pages: Mapping[str, npt.NDArray[np.int32]], most: int, now: Callable[[], float]
    ) -> None:
        """The shortest times are the least disturbed."""
        found: dict[int, float] = {}
        started = now()
        for turn in range(1 + _FEW_TURNS):
            for rows in (count for count in FewRows.MEASURED if count <= most):
                plan = target_probe(executor.spec, pages, 1, rows)
                began = now()
                executor.execute(plan)
                seconds = now() - began
                if turn:
                    found[rows] = min(seconds, found.get(rows, seconds))
            if turn and now() - started > _FEW_S:
                break
        self.few_rows.fit(found)
        for rows, seconds in found.items():
            self.target.observe(target_parts([(rows, 0)]), seconds / float(self.few_rows.of(rows)))


def _observe(cost: LinearCost, parts: Sequence[float], seconds: float) -> None:
    cost.observe(parts, seconds)
    if cost.num_seen % _FIT_EVERY == 0 or cost.num_seen < _FIT_EVERY:
        cost.fit()


def target_parts(rows: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Factors of a target forward's cost, for `LinearCost`. `rows`: per request, the number of rows and of tokens
    before them."""
    num_rows = context = rows_context = 0
    for count, before in rows:
        num_rows += count
        context += before
        rows_context += count * before
    return 1.0, num_rows, len(rows), context, rows_context, *(max(0, num_rows - knee) for knee in _KNEES)


def draft_parts(num_rows: int, counts: Sequence[int]) -> tuple[float, ...]:
    """Factors of a drafter run's cost, for `LinearCost`. `counts`: drafts per request."""
    passes = max(counts, default=0)
    return 1.0, num_rows, float(passes > 0), passes, sum(counts)
