"""An executor over many ranks: this process's, which is rank 0, and those that follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from baton.engine.executor import LocalExecutor
from baton.engine.plan import DraftPlan, DraftResult, PlanSpec, StepPlan, StepResult, Written
from baton.engine.ranks.followers import Followers
from baton.engine.ranks.messages import Copy, Draft, Order, Step

R = TypeVar("R")


class RankExecutor:
    """Runs each plan on all ranks; what it returns is rank 0's. When it returns, every rank has written its KV.

    A plan that raises on one rank leaves the others in the middle of a sum, so it ends the ranks: all later plans raise
    too, with which the engine ends.
    """

    def __init__(self, local: LocalExecutor, followers: Followers, spec: PlanSpec) -> None:
        # Other stages may have groups that this rank has not.
        self.local, self.spec = local, spec
        self._followers = followers

    def execute(self, plan: StepPlan, written: Written | None = None) -> StepResult:
        """As `LocalExecutor.execute`. Raises `EngineUnavailableError` where a rank has ended."""
        return self._together(Step(replace(plan, sampling=None)), lambda: self.local.execute(plan, written))

    def draft(self, plan: DraftPlan) -> DraftResult:
        """As `LocalExecutor.draft`. Raises as `execute` does."""
        return self._together(Draft(plan), lambda: self.local.draft(plan))

    def copy_page(self, group: str, source: int, destination: int) -> None:
        """As `LocalExecutor.copy_page`. Raises as `execute` does."""
        self._together(Copy(group, source, destination), lambda: self.local.copy_page(group, source, destination))

    def _together(self, order: Order, own: Callable[[], R]) -> R:
        """What `own` returns, rank 0's part of an order, once all ranks have done theirs."""
        self._followers.order(order)
        try:
            result = own()
        except Exception as error:
            raise self._followers.blame(error) from error
        self._followers.answered()
        return result

    def close(self) -> None:
        """End the other ranks, and let go of the pages."""
        self._followers.close()
        self.local.close()
