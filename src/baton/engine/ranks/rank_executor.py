"""An executor over rank 0 in this process, and its followers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from baton.engine.executor import LocalExecutor
from baton.engine.ranks.followers import Followers
from baton.engine.ranks.orders import Compute, Copy, Done, Draft, Order, drafts_digest
from baton.engine.step_plans import DraftPlan, DraftResult, PlanSpec, StepPlan, StepResult, Written
from baton.errors import EngineUnavailableError

R = TypeVar("R")


class RankExecutor:
    """Returns rank 0's result.

    A plan that raises on one rank leaves the others within a collective, so it ends all ranks, and the engine. So do
    drafts that differ between ranks, but not errors in choosing tokens, which only rank 0 does.
    """

    def __init__(self, local: LocalExecutor, followers: Followers, spec: PlanSpec) -> None:
        # `spec` is of all stages: rank 0 may lack groups of others.
        self.local, self.spec = local, spec
        self._followers = followers

    def execute(self, plan: StepPlan, written: Written | None = None) -> StepResult:
        """As `LocalExecutor.execute`. Raises `EngineUnavailableError` if a rank failed or has ended."""
        computed = self._on_all_ranks(Compute(replace(plan, sampling=None)), lambda: self.local.compute(plan, written))
        return self.local.sample(plan, computed)

    def draft(self, plan: DraftPlan) -> DraftResult:
        """Raises as `execute`."""
        result, answers = self._answers(Draft(plan), lambda: self.local.draft(plan))
        own = drafts_digest(result)
        for rank, answer in enumerate(answers, 1):
            if answer.drafts not in (own, None):
                raise EngineUnavailableError(self._followers.kill_all(f"rank {rank} has other drafts than rank 0"))
        return result

    def copy_page(self, group: str, source: int, destination: int) -> None:
        """Raises as `execute`."""
        self._on_all_ranks(Copy(group, source, destination), lambda: self.local.copy_page(group, source, destination))

    def _on_all_ranks(self, order: Order, own: Callable[[], R]) -> R:
        return self._answers(order, own)[0]

    def _answers(self, order: Order, own: Callable[[], R]) -> tuple[R, list[Done]]:
        self._followers.send(order)
        try:
            result = own()
        except Exception as error:
            raise self._followers.fail_after(error) from error
        return result, self._followers.answered()

    def close(self) -> None:
        self._followers.close()
        self.local.close()
