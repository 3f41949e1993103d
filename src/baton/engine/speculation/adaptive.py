"""k per step and request, from batch, context lengths, and measured acceptance and times: how many drafts are made, and
how many of them are verified.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from baton.engine.planning import DraftRows
from baton.engine.request import Request
from baton.engine.scheduler import ScheduledRows
from baton.engine.speculation.acceptance_rates import UNKNOWN, AcceptanceRates, OwnFactor, classes_of
from baton.engine.speculation.cost_model import FewRows, LinearCost
from baton.engine.speculation.draft_choice import DraftChoice, FloatArray, IntArray, RoundCosts, choose_drafts
from baton.engine.speculation.probe import draft_probe, target_probe
from baton.engine.speculation.trials import TRY_STEPS, Trials
from baton.engine.step_plans import DraftResult

if TYPE_CHECKING:
    from baton.engine.executor import Executor

log = logging.getLogger(__name__)

# After so many choices, doubled without drafts, one in this many requests gets a draft: acceptance may have risen.
PROBE_EVERY, PROBE_SELDOM, _PROBED_SHARE = 64, 512, 8
# In steps. No drafts hold longer, unless many requests leave.
CHOOSE_EVERY, CHOOSE_SELDOM, _MEASURE_EVERY, _FIRST_STEPS = 16, 64, 5, 64
_SHRUNK = 0.8
_FIT_EVERY = 16
# Rows beyond these numbers may cost more.
_KNEES = (8, 16, 24)
# How often few rows are measured, once kernels are loaded; fewer times after so many seconds.
_FEW_TURNS, _FEW_S = 3, 0.5
# A prefill leg never learns which drafts are accepted.
SEEDED_DRAFTS = 3
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


class DraftCounts(Protocol):
    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> IntArray: ...


class AdaptiveDrafts:
    """`timer`: seconds, for costs. `steps_per_pass`: of the drafter, for requests without drafts."""

    def __init__(self, most: int, timer: Callable[[], float] = time.monotonic, steps_per_pass: int = 1) -> None:
        self.timer, self._max_drafts, self._steps_per_pass = timer, most, steps_per_pass
        self._rates = AcceptanceRates(most)
        self._own: WeakKeyDictionary[Request, OwnFactor] = WeakKeyDictionary()
        # Of drafts that are to be verified.
        self._classes: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        self.target_cost = LinearCost((1.0, 16.0, 8.0, 4096.0, 16384.0, *[16.0] * len(_KNEES)))
        self.drafter_cost = LinearCost((1.0, 16.0, 1.0, 4.0, 16.0))
        self.few_rows = FewRows()
        self._num_choices = self._num_steps = self._num_probes = 0
        self._choose_at, self._probe_at, self._probe_wait = 0, PROBE_EVERY, PROBE_EVERY
        self._least_requests = 0.0
        self._trials = Trials()
        self._num_accepted, self._draft_s = 0, 0.0  # of this step
        self._chosen: dict[str, int] = {}
        self._threshold = 0.0
        self._probed: set[Request] = set()  # in this step

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        classes = self._classes.pop(request, [])[:num_drafts]
        classes += [UNKNOWN] * (num_drafts - len(classes))
        self._rates.verified(self._own.setdefault(request, OwnFactor()), classes, num_accepted)
        self._num_accepted += num_accepted

    def computed(self, scheduled: Sequence[ScheduledRows], seconds: float) -> None:
        self._num_steps += 1
        decodes = not any(rows.request.is_prefilling for rows in scheduled)
        if decodes:
            self._trials.computed(len(scheduled), self._num_accepted, self._draft_s + seconds)
        self._num_accepted, self._draft_s = 0, 0.0
        if self._measures and decodes:
            seconds /= float(self.few_rows.of(sum(rows.num_rows for rows in scheduled)))
            self._observe(self.target_cost, target_parts([(rows.num_rows, rows.start) for rows in scheduled]), seconds)

    def drafted(self, draft_rows: Sequence[DraftRows], seconds: float) -> None:
        self._draft_s += seconds
        if self._measures:
            num_rows = sum(rows.stop - rows.start for rows in draft_rows)
            self._observe(self.drafter_cost, draft_parts(num_rows, [rows.num_drafts for rows in draft_rows]), seconds)

    @property
    def _measures(self) -> bool:
        return self._num_steps < _FIRST_STEPS or self._num_steps % _MEASURE_EVERY == 0

    def _observe(self, cost: LinearCost, parts: Sequence[float], seconds: float) -> None:
        cost.observe(parts, seconds)
        if cost.num_seen % _FIT_EVERY == 0 or cost.num_seen < _FIT_EVERY:
            cost.fit()

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> IntArray:
        bounds = np.maximum(np.array(most, dtype=np.int64), 0)
        self._num_choices += 1
        self._probed.clear()
        chosen = [self._chosen.get(request.request_id) for request in requests]
        if self._num_choices >= self._choose_at or len(requests) < self._least_requests or None in chosen:
            choice, steps = self._best(requests, bounds), CHOOSE_EVERY
            counts, self._threshold = choice.counts, choice.threshold
            if not counts.any():
                self._trials.end()
                steps = CHOOSE_SELDOM
            else:
                if not self._trials.begin(len(requests)):
                    counts, steps = np.zeros_like(counts), CHOOSE_SELDOM
                if self._trials.is_trying:
                    steps = TRY_STEPS
            self._chosen = {request.request_id: k for request, k in zip(requests, counts.tolist(), strict=True)}
            self._choose_at = self._num_choices + steps
            self._least_requests = 0.0 if counts.any() else _SHRUNK * len(requests)
        else:
            counts = np.array(chosen, dtype=np.int64)
        if self._num_choices >= self._probe_at:
            self._probe(requests, counts)
        return np.minimum(counts, bounds)

    def _probe(self, requests: Sequence[Request], counts: IntArray) -> None:
        self._probe_wait = PROBE_EVERY if counts.any() else min(2 * self._probe_wait, PROBE_SELDOM)
        self._probe_at = self._num_choices + self._probe_wait
        self._num_probes += 1
        count = -(-len(counts) // _PROBED_SHARE)
        probed = (self._num_probes * count + np.arange(count)) % len(counts)
        counts[probed] = np.maximum(counts[probed], 1)
        self._probed = {requests[index] for index in probed.tolist()}

    def _best(self, requests: Sequence[Request], bounds: IntArray) -> DraftChoice:
        self._rates.update()
        survival = self._rates.expected(self._factors(requests))
        return choose_drafts(survival, bounds, self._costs(np.array([len(r.token_ids) for r in requests])))

    def _factors(self, requests: Sequence[Request]) -> FloatArray:
        own = (self._own.get(request) for request in requests)
        return np.array([1.0 if one is None else one.factor for one in own])

    def keep(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], margins_RK: FloatArray) -> list[int]:
        """How many drafts of each request to verify. `margins_RK`: `DraftResult.margins`."""
        counts = [len(ids) for ids in drafts]
        made = [index for index, request in enumerate(requests) if counts[index] and request.role != "prefill"]
        if not made:
            return counts
        classes = classes_of(margins_RK[made])
        self._rates.drafted(classes)
        drafting = [requests[index] for index in made]
        kept = (self._rates.survival(self._factors(drafting), classes) >= self._threshold).sum(axis=1)
        for index, request, most, found in zip(made, drafting, kept.tolist(), classes.tolist(), strict=True):
            if request not in self._probed:
                counts[index] = min(counts[index], most)
            self._classes[request] = found
        return counts

    def _costs(self, contexts: IntArray) -> RoundCosts:
        _, row, _, _, row_context, *beyond = self.target_cost.each()
        _, _, start, depth, draft = self.drafter_cost.each()
        target = self.target_cost.seconds(target_parts([(1, c) for c in contexts.tolist()]))
        entries, steps = self.drafter_cost.seconds(draft_parts(len(contexts), [0])), self._steps_per_pass
        waiting = self.drafter_cost.seconds(draft_parts(steps * len(contexts), [0])) / steps
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
    ) -> None:
        """`limits`: the most requests and rows of a step, and tokens of a request."""
        most_requests, most_rows, most_tokens = limits
        now, spec = self.timer, executor.spec
        started = now()
        slots = (len(pages[name]) for name in (*spec.state_groups, *spec.draft_state_groups))
        most_requests = min((most_requests, *slots))
        self._measure_few_rows(executor, pages, min(most_rows, most_tokens))
        for repeated in range(2):  # the first time, kernels are loaded
            for requests, rows, context in _TARGET_PROBES:
                if requests > most_requests or requests * rows > most_rows or context + rows > most_tokens:
                    continue
                plan = target_probe(spec, pages, requests, rows, context)
                began = now()
                executor.execute(plan)
                if repeated:
                    self.target_cost.observe(target_parts([(rows, context)] * requests), now() - began)
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
                    self.drafter_cost.observe(draft_parts(requests, [drafts] * requests), now() - began)
        for cost in (self.target_cost, self.drafter_cost):
            for _ in range(4):  # each fit stays close to the last
                cost.fit()
        log.info("measured the costs of drafts in %.2f s", now() - started)

    def _measure_few_rows(self, executor: Executor, pages: Mapping[str, npt.NDArray[np.int32]], most: int) -> None:
        """In turns; the shortest times count, as the least disturbed."""
        found: dict[int, float] = {}
        now, started = self.timer, self.timer()
        for turn in range(1 + _FEW_TURNS):
            for rows in range(1, min(most + 1, FewRows.NUM)):
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
            self.target_cost.observe(target_parts([(rows, 0)]), seconds / float(self.few_rows.of(rows)))


def limit_drafts(chooser: DraftCounts, draft_rows: Sequence[DraftRows]) -> list[DraftRows]:
    chosen = [rows for rows in draft_rows if rows.num_drafts > 0 and rows.request.role != "prefill"]
    if not chosen:
        return [_at_most(rows, SEEDED_DRAFTS) for rows in draft_rows]
    counts = chooser.choose([rows.request for rows in chosen], [rows.num_drafts for rows in chosen])
    most = {rows.request: count for rows, count in zip(chosen, counts.tolist(), strict=True)}
    return [_at_most(rows, most.get(rows.request, SEEDED_DRAFTS)) for rows in draft_rows]


def kept_drafts(
    chooser: AdaptiveDrafts | None, draft_rows: Sequence[DraftRows], result: DraftResult
) -> list[list[int]]:
    """The drafts to verify, of those that the drafter made: by request, in the order of `draft_rows`."""
    if chooser is None or result.margins is None:
        return result.drafts
    counts = chooser.keep([rows.request for rows in draft_rows], result.drafts, result.margins)
    return [ids[:count] for ids, count in zip(result.drafts, counts, strict=True)]


def _at_most(rows: DraftRows, most: int) -> DraftRows:
    return rows if rows.num_drafts <= most else DraftRows(*rows[:4], most)


def target_parts(rows: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """`rows`: per request, the number of rows and of tokens before them."""
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
