"""Executors run plans, in one process or several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.drafters.base import TargetRead
from baton.engine.runner import ModelRunner, TargetOutput
from baton.engine.sampling.prompt_logprobs import prompt_logprobs
from baton.engine.sampling.sampler import choose_tokens
from baton.engine.step_plans import (
    DraftPlan,
    DraftResult,
    IntArray,
    PlanSpec,
    PromptLogprobRows,
    StepPlan,
    StepResult,
    Written,
)
from baton.wire import TokenLogprobs


class Executor(Protocol):
    """When a call returns, its writes are visible to every process. A plan that raises has written KV of its rows only,
    so it may run again, whole or in parts.
    """

    spec: PlanSpec

    def execute(self, plan: StepPlan, written: Written | None = None) -> StepResult:
        """Target forward and choice of tokens.

        `written` is called on this thread after each layer of this process. Other tensor ranks may still be writing
        that layer, but have written the earlier ones.
        """
        ...

    def draft(self, plan: DraftPlan) -> DraftResult:
        """Drafter forward over rows of the plan that was executed last, and of earlier ones from its `oldest` on."""
        ...

    def copy_page(self, group: str, source: int, destination: int) -> None:
        """Copy one page before this returns: a peer may be asked at once to write into the rest of it."""
        ...

    def close(self) -> None:
        """Release weights and pages; the owner of the pages' memory frees it."""
        ...


# Rows whose logits are in memory at once.
_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class TargetResult:
    """`logits`: of the rows to sample; if their greedy `choices` are known only of those that need them."""

    logits: Tensor | None
    choices: IntArray | None
    features: np.ndarray
    scores: list[TokenLogprobs | None]


class LocalExecutor:
    """Runs plans in this process, on one rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.spec = runner.spec
        self._output: TargetOutput | None = None
        self._outputs: dict[int, TargetOutput] = {}

    def execute(self, plan: StepPlan, written: Written | None = None) -> StepResult:
        return self.sample(plan, self.compute(plan, written))

    @torch.inference_mode()
    def compute(self, plan: StepPlan, written: Written | None = None) -> TargetResult:
        """All ranks run this part of `execute`."""
        output = self._forward(plan, written)
        features = _on_host(self.runner.features(output) if len(plan.feature_rows) else None, plan.feature_rows)
        scores = [one for block, logits in self._scored(plan, output) for one in prompt_logprobs(logits, block)]
        choices, logits = self.runner.likeliest(output, plan.sample_rows, _needing_logits(plan)) or (None, None)
        if choices is None and len(plan.sample_rows):
            logits = self.runner.logits(output, plan.sample_rows)
        return TargetResult(logits, choices, features, scores)

    def _forward(self, plan: StepPlan, written: Written | None) -> TargetOutput:
        output = self._output = self.runner.forward(plan.rows, written)
        for number in list(itertools.takewhile(lambda number: number < plan.oldest, self._outputs)):
            del self._outputs[number]
        if plan.number:
            self._outputs[plan.number] = output
        return output

    @torch.inference_mode()
    def sample(self, plan: StepPlan, computed: TargetResult) -> StepResult:
        """The part of `execute` on rank 0 only."""
        logits, choices, sampling, rows = computed.logits, computed.choices, plan.sampling, plan.logit_rows
        if logits is None:
            choices = plan.sample_rows
        elif choices is None:
            choices = choose_tokens(logits, sampling)
        elif len(logits):
            needing = _needing_logits(plan)
            rows = np.searchsorted(needing, rows)
            if sampling is not None:
                sampling = replace(sampling, row=np.searchsorted(needing, sampling.row))
                choices[needing] = choose_tokens(logits, sampling, choices[needing])
        result = StepResult(choices, _on_host(logits, rows), computed.features, computed.scores)
        self._synchronize()
        return result

    def _scored(self, plan: StepPlan, output: TargetOutput) -> Iterator[tuple[PromptLogprobRows, Tensor]]:
        """In blocks, with logits [rows, V]: a whole prompt's would take gigabytes."""
        scored = plan.scored
        for first in range(0, 0 if scored is None else len(scored.row), _SCORED_ROWS):
            assert scored is not None
            part = slice(first, first + _SCORED_ROWS)
            block = PromptLogprobRows(scored.row[part], scored.token[part], scored.num_top[part])
            yield block, self.runner.logits(output, block.row)

    @torch.inference_mode()
    def compute_follower(self, plan: StepPlan) -> None:
        output = self._forward(plan, None)
        if self.runner.model.build.ranks.stage.index == 0:
            for _ in self._scored(plan, output):
                pass
            if len(plan.sample_rows):
                self.runner.logits(output, plan.sample_rows)

    @torch.inference_mode()
    def draft(self, plan: DraftPlan) -> DraftResult:
        output = self._output
        assert output is not None
        if len(plan.feature_steps):
            plan, output = self._gathered(plan)
        result = self.runner.draft(plan, output)
        self._synchronize()
        return result

    @torch.inference_mode()
    def attend_for_drafter(self, plan: DraftPlan, reads: Sequence[TargetRead]) -> None:
        self.runner.attend_for_drafter(plan, reads)

    def _gathered(self, plan: DraftPlan) -> tuple[DraftPlan, TargetOutput]:
        """The plan as one for a single step."""
        numbers, index = np.unique(plan.feature_steps, return_inverse=True)
        kept = [self._outputs[number] for number in numbers.tolist()]
        begins = np.cumsum([0, *(len(output.hidden_TE) for output in kept[:-1])])
        rows = torch.from_numpy(begins[index] + plan.feature_rows).to(kept[0].hidden_TE.device)
        aux = [torch.cat(states) for states in zip(*(output.aux for output in kept), strict=True)]
        joined = TargetOutput(torch.cat([output.hidden_TE for output in kept]), aux).take(rows)
        return replace(plan, feature_rows=np.arange(len(rows)), feature_steps=plan.feature_steps[:0]), joined

    def copy_page(self, group: str, source: int, destination: int) -> None:
        if group in self.runner.kv:  # else its layers are on other stages
            pages = self.runner.kv[group].pages
            pages[destination].copy_(pages[source])
            self._synchronize()

    def _synchronize(self) -> None:
        """The core may declare pages final at once, and transports copy on streams of their own."""
        if self.runner.device.type == "cuda":
            torch.cuda.current_stream(self.runner.device).synchronize()

    def close(self) -> None:
        self.runner.release()
        self._output = None
        self._outputs.clear()


def _needing_logits(plan: StepPlan) -> IntArray:
    """Indices into `sample_rows`, ascending."""
    return plan.logit_rows if plan.sampling is None else np.union1d(plan.sampling.row, plan.logit_rows)


def _on_host(values: Tensor | None, rows: IntArray) -> np.ndarray:
    if values is None or not len(rows):
        return np.zeros((0, 0), dtype=np.float32)
    if len(rows) < len(values):
        values = values[torch.from_numpy(rows).to(values.device)]
    return values.float().cpu().numpy()
