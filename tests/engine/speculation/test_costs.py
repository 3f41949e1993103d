"""What a forward costs, by its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.engine.scheduler import ScheduledRows
from baton.engine.speculation.cost_model import FewRows
from baton.engine.speculation.probe import draft_probe
from baton.engine.speculation.step_costs import StepCosts, target_parts
from baton.engine.step_plans import DraftPlan, PlanSpec, StepPlan


def test_what_few_rows_cost_over_a_line_says_nothing_of_more() -> None:
    few = FewRows()
    few.fit({1: 1.0, 2: 2.0})
    assert few.of([1, 2, 4, 8, 9, 100]).tolist() == [1.0] * 6
    few.fit({1: 1.0, 2: 4.0, 3: 3.0})
    assert few.of([1, 2, 3]) == pytest.approx([1.0 / (5 / 3), 4.0 / (8 / 3), 3.0 / (11 / 3)])
    between, *more = few.of([4, 6, 9, 100]).tolist()
    assert 9 / 11 < between < 1.0
    assert more == [1.0] * 3


@pytest.mark.parametrize(
    "seconds",
    [
        {rows: rows * (1.0 if rows <= 16 else 1.3) for rows in FewRows.MEASURED},
        {rows: 1.0 + 1e3 * (rows == 32) for rows in FewRows.MEASURED},
        {rows: 1.0 + 1e3 * (rows == 1) for rows in FewRows.MEASURED},
    ],
    ids=["many rows are slow", "32 rows were disturbed", "1 row was disturbed"],
)
def test_no_number_of_rows_costs_less_than_nothing(seconds: dict[int, float]) -> None:
    few = FewRows()
    few.fit(seconds)
    factors = few.of(range(1, 65))
    assert factors.min() > 0.0
    assert few.of(2) < 2.0


class UnevenExecutor:
    """Its own clock: 1 ms and 1 ms a row, twice as long for three rows; one forward is disturbed."""

    def __init__(self) -> None:
        self.spec = PlanSpec(("target",), ("draft",), (), drafts=True, needs_contexts=False)
        self.now, self._disturb = 0.0, 20

    def seconds(self, num_rows: int) -> float:
        return 1e-3 * (1 + num_rows) * (2 if num_rows == 3 else 1)

    def execute(self, plan: StepPlan) -> None:
        self.now += self.seconds(len(plan.rows.token_ids))
        self._disturb -= 1
        if not self._disturb:
            self.now += 0.02

    def draft(self, plan: DraftPlan) -> None:
        self.now += 1e-3


def test_each_small_number_of_rows_is_measured() -> None:
    executor: Any = UnevenExecutor()
    costs = StepCosts(8)
    pages = {name: np.arange(1, 9, dtype=np.int32) for name in ("target", "draft")}
    costs.measure(executor, pages, (1, 8, 8), lambda: executor.now)
    for rows in range(1, 9):
        cost = costs.target.seconds(target_parts([(rows, 0)])) * float(costs.few_rows.of(rows))
        assert cost == pytest.approx(executor.seconds(rows), rel=0.2)
    decoding: Any = SimpleNamespace(is_prefilling=False)
    line = costs.target.seconds(target_parts([(3, 8)]))
    for _ in range(64):
        costs.computed([ScheduledRows(decoding, 8, 3)], True, executor.seconds(3))
    assert costs.target.seconds(target_parts([(3, 8)])) == pytest.approx(line, rel=0.1)


def test_a_probe_has_pages_for_its_drafts_if_a_page_holds_one_token() -> None:
    spec = PlanSpec(("target",), ("draft",), (), drafts=True, needs_contexts=False)
    plan = draft_probe(spec, {"draft": np.array([7, 8], dtype=np.int32)}, 2, 4)
    assert plan.rows.tables["draft"].tolist() == [[7, 8, 7, 8, 7]] * 2
