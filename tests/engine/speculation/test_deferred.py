"""Drafter rows that wait while their requests get no drafts: later drafts are the same as if they had not waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from baton.engine.planning import DraftRows, FeatureRows
from baton.engine.request import Request, RequestStatus
from baton.engine.speculation.adaptive import AdaptiveDrafts
from baton.engine.speculation.deferred import MOST_ROWS, MOST_STEPS, DeferredRows
from baton.engine.step_plans import DraftPlan, DraftResult
from baton.wire import SamplingParams
from testkit.engines import EAGLE3, TARGET, Stepped, stepped
from testkit.inside import kept_features
from tests.engine.speculation.test_adaptive import auto, prompts_of

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class Rarely(AdaptiveDrafts):
    """Drafts at few lengths of a request."""

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> np.ndarray:
        lengths = np.array([len(request.token_ids) for request in requests])
        return np.where(lengths % 11 == 0, np.minimum(np.array(most), 3), 0)


def run(one: Stepped, deferred: DeferredRows | None) -> tuple[list[list[list[int]]], list[list[int]], int]:
    """The drafts of each pass that drafted, how many were accepted by stream, and the number of passes."""
    steps = one.core.steps
    steps.adaptive, steps.deferred = Rarely(8), deferred
    plans: list[DraftPlan] = []
    found: list[list[list[int]]] = []
    draft = steps.executor.draft

    def noted(plan: DraftPlan) -> DraftResult:
        result = draft(plan)
        plans.append(plan)
        found.append([ids for ids in result.drafts if ids])
        return result

    steps.executor.draft = noted  # type: ignore[method-assign]
    try:
        streams = one.all_of(prompts_of(one), PARAMS)
    finally:
        steps.executor.draft = draft  # type: ignore[method-assign]
    return [drafts for drafts in found if drafts], [stream.accepted for stream in streams], len(plans)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("spec", [EAGLE3, {"method": "draft_model", "model": TARGET}], ids=lambda spec: spec["method"])
def test_drafts_after_rows_that_waited_are_the_same(spec: dict[str, Any]) -> None:
    with stepped(speculative_config=auto(spec), kv_cache_memory=8 << 20, enable_prefix_caching=False) as one:
        drafts, accepted, passes = run(one, one.core.steps.deferred)
        assert drafts
        assert any(map(sum, accepted))
        one.run("next", [3], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        assert len(kept_features(one)) <= 2, "those of ended requests are dropped"
        expected, expected_accepted, all_passes = run(one, None)
        assert drafts == expected
        assert accepted == expected_accepted
        assert passes < all_passes / 2


class RequestStub:
    prefill_len = 4
    finish_reason: str | None = None

    def __init__(self) -> None:
        self.status, self.num_drafted, self.num_computed = RequestStatus.RUNNING, 4, 4


def rows(request: Any, step: int, start: int, num_drafts: int = 0) -> DraftRows:
    request.num_computed = start + 1
    return DraftRows(request, (FeatureRows(step, 0, 1),), start, start + 1, num_drafts)


def test_rows_wait_until_their_request_drafts() -> None:
    deferred, first, second = DeferredRows(), RequestStub(), RequestStub()
    assert deferred.begin(2) == (1, 1)
    assert deferred.due([rows(first, 1, 3), rows(second, 1, 3)]) == [rows(first, 1, 3), rows(second, 1, 3)]  # prompts
    assert deferred.begin(2) == (2, 2)
    assert deferred.due([rows(first, 2, 4), rows(second, 2, 4)]) == []
    assert deferred.begin(2) == (3, 2)
    (due,) = deferred.due([rows(first, 3, 5, num_drafts=2), rows(second, 3, 5)])
    assert (due.request, due.start, due.stop, due.num_drafts) == (first, 4, 6, 2)
    assert due.features == (FeatureRows(2, 0, 1), FeatureRows(3, 0, 1))
    first.num_drafted = 6
    assert deferred.begin(2) == (4, 2)


def test_all_rows_are_due_once_one_has_waited_for_long() -> None:
    deferred, first, second = DeferredRows(), RequestStub(), RequestStub()
    for step in range(1, MOST_STEPS):
        deferred.begin(2)
        assert deferred.due([rows(first, step, 3 + step)]) == []
    assert deferred.begin(2) == (MOST_STEPS, 1)
    found = deferred.due([rows(first, MOST_STEPS, 3 + MOST_STEPS), rows(second, MOST_STEPS, 4)])
    assert [(one.request, one.start, one.stop) for one in found] == [(first, 4, 4 + MOST_STEPS), (second, 4, 5)]


def test_rows_of_a_request_that_has_just_ended_are_not_due() -> None:
    """Its stream is closed, so nothing may fail for it any more."""
    deferred, first, second = DeferredRows(), RequestStub(), RequestStub()
    for step in range(1, MOST_STEPS):
        deferred.begin(2)
        assert deferred.due([rows(first, step, 3 + step), rows(second, step, 3 + step)]) == []
    deferred.begin(2)
    first.finish_reason = "stop"
    assert [one.request for one in deferred.due([rows(second, MOST_STEPS, 3 + MOST_STEPS)])] == [second]


def test_all_rows_are_due_once_many_are_kept() -> None:
    """Prompts' too."""
    deferred, first, second = DeferredRows(), RequestStub(), RequestStub()
    deferred.begin(MOST_ROWS - 2)
    assert deferred.due([rows(first, 1, 4)]) == []
    deferred.begin(2)
    assert deferred.due([rows(first, 2, 5)]) == []
    deferred.begin(1)
    found = deferred.due([rows(first, 3, 6), rows(second, 3, 4)])
    assert [(one.request, one.start, one.stop) for one in found] == [(first, 4, 7), (second, 4, 5)]
    first.num_drafted, second.num_drafted = 7, 5
    assert deferred.begin(2) == (4, 4)  # what is no longer kept does not count
    assert deferred.due([rows(first, 4, 7), rows(second, 4, 5)]) == []


def test_rows_of_a_request_that_has_no_room_in_steps_are_due_too() -> None:
    """Otherwise the features of all these steps would be kept."""
    deferred, first, second = DeferredRows(), RequestStub(), RequestStub()
    deferred.begin(2)
    assert deferred.due([rows(first, 1, 4)]) == []
    for step in range(2, MOST_STEPS):
        assert deferred.begin(2) == (step, 1)
        assert [one.request for one in deferred.due([rows(second, step, 2 + step, num_drafts=1)])] == [second]
        second.num_drafted = 3 + step
    assert deferred.begin(2) == (MOST_STEPS, 1)
    found = deferred.due([rows(second, MOST_STEPS, 2 + MOST_STEPS)])
    assert [(one.request, one.start, one.stop) for one in found] == [(first, 4, 5), (second, 18, 19)]
    first.num_drafted, second.num_drafted = 5, 19
    assert deferred.begin(2) == (MOST_STEPS + 1, MOST_STEPS + 1)


def test_rows_of_steps_of_a_batch_that_does_not_change_wait_together() -> None:
    deferred, first, second = DeferredRows(most_steps=None), RequestStub(), RequestStub()
    for step in range(1, 30):
        assert deferred.begin(2) == (step, 1)
        first.num_computed, second.num_computed = 3 + step, 3 + step
        assert deferred.wait([first, second])  # type: ignore[list-item]
    assert deferred.begin(1) == (30, 1)
    first.num_computed = 33
    assert not deferred.wait([first])  # type: ignore[list-item]
    (due,) = deferred.due([rows(first, 30, 33, num_drafts=1)])
    assert (due.start, due.stop, due.num_drafts) == (4, 34, 1)
    assert due.features == tuple(FeatureRows(step, 0, 1) for step in range(1, 31))
    second.num_computed = 33
    waited = deferred.take(second)  # type: ignore[arg-type]
    assert waited is not None
    assert (waited.start, waited.stop) == (4, 33)
    assert waited.features == tuple(FeatureRows(step, 1, 1) for step in range(1, 30))
    first.num_drafted = 34
    assert deferred.begin(1) == (31, 31)


def test_a_pass_has_few_rows_of_earlier_steps() -> None:
    """Others are computed later, and their requests drafted for then."""
    deferred, requests = DeferredRows(most_steps=None), [RequestStub() for _ in range(3)]
    deferred.rows_of_pass = 6
    for step in range(1, 6):
        deferred.begin(3)
        assert deferred.due([rows(one, step, 3 + step) for one in requests]) == []
    deferred.begin(3)
    due = deferred.due([rows(one, 6, 9, num_drafts=2) for one in requests])
    assert [one.request for one in due] == requests[:1]
    requests[0].num_drafted = 10
    deferred.begin(3)
    due = deferred.due([rows(one, 7, 10, num_drafts=2) for one in requests])
    assert [(one.request, one.start, one.stop) for one in due] == [(requests[0], 10, 11), (requests[1], 4, 11)]


@pytest.mark.parametrize("cause", ["ended", "preempted", "preempted, and its first entries were cached"])
def test_rows_of_requests_that_left_are_forgotten(cause: str) -> None:
    deferred, request = DeferredRows(), RequestStub()
    deferred.begin(2)
    assert deferred.due([rows(request, 1, 4)]) == []
    if cause == "ended":
        request.status = RequestStatus.FINISHED
    else:
        request.num_drafted = request.num_computed = 0 if cause == "preempted" else 4
    assert deferred.begin(2) == (2, 2)
