"""How many drafts each request makes in a step, and how many are verified (k "auto")."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from baton.engine.planning import DraftRows
from baton.engine.request import Request
from baton.engine.scheduler import ScheduledRows
from baton.engine.speculation.acceptance_rates import UNKNOWN, AcceptanceRates, OwnFactor, classes_of
from baton.engine.speculation.draft_choice import DraftChoice, FloatArray, IntArray, choose_drafts
from baton.engine.speculation.step_costs import StepCosts
from baton.engine.speculation.trials import TRY_STEPS, Trials
from baton.engine.step_plans import DraftResult

# After so many choices, doubled without drafts, one in this many requests gets a draft: acceptance may have risen.
PROBE_EVERY, PROBE_SELDOM, _PROBED_SHARE = 64, 512, 8
# Steps for which a choice holds: with drafts, and without any, unless many requests leave.
CHOOSE_EVERY, CHOOSE_SELDOM = 16, 64
_SHRUNK = 0.8
# A prefill leg never learns which drafts are accepted.
SEEDED_DRAFTS = 3


class DraftCounts(Protocol):
    """Chooses how many drafts requests make."""

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> IntArray: ...


class AdaptiveDrafts:
    """Chooses 0 to `most` drafts per request. `timer`: seconds of steps. `steps_per_pass`: as of `StepCosts`."""

    def __init__(self, most: int, timer: Callable[[], float] = time.monotonic, steps_per_pass: int = 1) -> None:
        self.timer = timer
        self.costs = StepCosts(most, steps_per_pass)
        self._rates = AcceptanceRates(most)
        self._own: WeakKeyDictionary[Request, OwnFactor] = WeakKeyDictionary()
        # The classes of the drafts that are to be verified.
        self._classes: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        self._num_choices = self._num_probes = 0
        self._choose_at, self._probe_at, self._probe_wait = 0, PROBE_EVERY, PROBE_EVERY
        self._least_requests = 0.0
        self._trials = Trials()
        self._num_accepted, self._draft_s = 0, 0.0  # of this step
        self._chosen: dict[str, int] = {}
        self._threshold = 0.0
        self._probed: set[Request] = set()  # in this step
        self._idle: list[Request] = []  # of the last choice, if none drafts

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        classes = self._classes.pop(request, [])[:num_drafts]
        classes += [UNKNOWN] * (num_drafts - len(classes))
        self._rates.verified(self._own.setdefault(request, OwnFactor()), classes, num_accepted)
        self._num_accepted += num_accepted

    def computed(self, scheduled: Sequence[ScheduledRows], seconds: float) -> None:
        decodes = not any(rows.request.is_prefilling for rows in scheduled)
        if decodes:
            self._trials.computed(len(scheduled), self._num_accepted, self._draft_s + seconds)
        self._num_accepted, self._draft_s = 0, 0.0
        self.costs.computed(scheduled, decodes, seconds)

    def drafted(self, draft_rows: Sequence[DraftRows], seconds: float) -> None:
        self._draft_s += seconds
        self.costs.drafted(draft_rows, seconds)

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> IntArray:
        """Drafts int64 [R] for this step, at most `most` [R]. A choice holds for some steps, unless a request comes or
        many leave. Now and then some requests get a draft only to measure acceptance."""
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
        counts = np.minimum(counts, bounds)
        self._idle = [] if counts.any() else list(requests)
        return counts

    def holds_none(self, requests: list[Request]) -> bool:
        """Whether a choice of no drafts for these requests holds for another step."""
        holds = requests == self._idle and self._num_choices + 1 < min(self._choose_at, self._probe_at)
        self._num_choices += holds
        return holds

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
        return choose_drafts(survival, bounds, self.costs.of_round(np.array([len(r.token_ids) for r in requests])))

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


def limit_drafts(chooser: DraftCounts, draft_rows: Sequence[DraftRows]) -> list[DraftRows]:
    """The rows with as many drafts as `chooser` gives their requests; prefill legs make `SEEDED_DRAFTS`."""
    chosen = [rows for rows in draft_rows if rows.num_drafts > 0 and rows.request.role != "prefill"]
    if not chosen:
        return [_at_most(rows, SEEDED_DRAFTS) for rows in draft_rows]
    counts = chooser.choose([rows.request for rows in chosen], [rows.num_drafts for rows in chosen])
    most = {rows.request: count for rows, count in zip(chosen, counts.tolist(), strict=True)}
    return [_at_most(rows, most.get(rows.request, SEEDED_DRAFTS)) for rows in draft_rows]


def kept_drafts(
    chooser: AdaptiveDrafts | None, draft_rows: Sequence[DraftRows], result: DraftResult
) -> list[list[int]]:
    """The drafts to verify, by request."""
    if chooser is None or result.margins is None:
        return result.drafts
    counts = chooser.keep([rows.request for rows in draft_rows], result.drafts, result.margins)
    return [ids[:count] for ids, count in zip(result.drafts, counts, strict=True)]


def _at_most(rows: DraftRows, most: int) -> DraftRows:
    return rows if rows.num_drafts <= most else DraftRows(*rows[:4], most)
