"""Who waits for whom in an engine, and who is preempted."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest
from tests.kv.test_cache import Memory

NUMBERS = itertools.count(1)


def arriving(scheduler: Scheduler, length: int, **fields: Any) -> Request:
    number = next(NUMBERS)  # no prompt begins as another
    prompt = [100 * number + token for token in range(length)]
    wire = GenerateRequest(request_id=f"{number}", prompt_token_ids=prompt, sampling_params=SamplingParams(), **fields)
    sampler: Any = SimpleNamespace(advance=lambda tokens: None)
    request = Request(wire, sampler)
    request.arrival = number
    scheduler.enqueue(request)
    return request


def test_classes_come_first_and_then_the_earliest_due() -> None:
    scheduler = Scheduler(Memory(num_pages=400).cache, 16, 64)
    late, soon = arriving(scheduler, 4), arriving(scheduler, 4, ttft_slo_s=0.5)
    batch, better = arriving(scheduler, 4, priority=1), arriving(scheduler, 4, priority=-1)
    assert list(scheduler.waiting) == [better, soon, late, batch]
    overdue = arriving(scheduler, 4, ttft_slo_s=1.0, waited_s=30.0)
    assert scheduler.waiting[1] is overdue, "it has waited elsewhere"


def test_the_worst_class_is_preempted_first() -> None:
    scheduler = Scheduler(Memory(num_pages=17).cache, 64, 8)
    batch, ordinary = arriving(scheduler, 20, priority=1), arriving(scheduler, 20)
    for rows in scheduler.schedule():
        rows.request.num_computed = rows.num_rows
    assert scheduler.running == [ordinary, batch]
    scheduler.running.reverse()
    ordinary.token_ids += range(20)
    ordinary.num_computed = len(ordinary.token_ids) - 1
    assert [rows.request for rows in scheduler.schedule()] == [ordinary]
    assert list(scheduler.waiting) == [batch]
