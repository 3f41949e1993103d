"""Who waits for whom in an engine, and who is preempted."""

from __future__ import annotations

from baton.engine.scheduler import Scheduler
from testkit.arrivals import arriving
from tests.kv.test_cache import Memory


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
