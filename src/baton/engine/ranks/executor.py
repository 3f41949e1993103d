"""An executor over many ranks: this process's, which is rank 0, and those that follow it."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.executor import LocalExecutor
from baton.engine.plan import DraftPlan, DraftResult, PlanSpec, StepPlan, StepResult
from baton.engine.ranks.followers import Followers
from baton.engine.ranks.messages import Copy, Draft, Order, Step


class RankExecutor:
    """Runs each plan on all ranks; what it returns is rank 0's. When it returns, every rank has written its KV.

    A plan that raises on one rank leaves the others in the middle of a sum, so it ends the ranks: all later plans raise
    too, with which the engine ends.
    """

    def __init__(self, local: LocalExecutor, followers: Followers, spec: PlanSpec) -> None:
        # Other stages may have groups that this rank has not.
        self.local, self.spec = local, spec
        self._followers = followers

    def execute(self, plan: StepPlan) -> StepResult:
        """As `LocalExecutor.execute`. Raises `EngineUnavailableError` where a rank has ended."""
        self._followers.order(Step(replace(plan, sampling=None)))
        try:
            result = self.local.execute(plan)
        except Exception as error:
            raise self._followers.blame(error) from error
        self._followers.answered()
        return result

    def draft(self, plan: DraftPlan) -> DraftResult:
        """As `LocalExecutor.draft`. Raises as `execute` does."""
        self._followers.order(Draft(plan))
        try:
            drafts = self.local.draft(plan)
        except Exception as error:
            raise self._followers.blame(error) from error
        self._followers.answered()
        return drafts

    def copy_page(self, group: str, source: int, destination: int) -> None:
        """As `LocalExecutor.copy_page`."""
        self._order(Copy(group, source, destination))
        self.local.copy_page(group, source, destination)

    def _order(self, message: Order) -> None:
        self._followers.order(message)
        self._followers.answered()

    def close(self) -> None:
        """End the other ranks, and let go of the pages."""
        self._followers.close()
        self.local.close()
