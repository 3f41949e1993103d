"""A step is data: a plan that was serialised gives the same result, and a result contains what the plan asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.config import SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.engine.sampling.sampling_state import SamplingRows, SamplingState, sampling_of
from baton.engine.step_plans import DraftPlan, StepPlan, one_request
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from testkit.engines import EAGLE3, Stepped, request, stepped

PROMPTS = [[5, 6, 7, 8] * 6, [9, 9, 9], [1], list(range(40, 90)), [3, 4]]
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.0),
    SamplingParams(max_tokens=16, temperature=0.9, seed=2**64 - 1, presence_penalty=0.5, logprobs=2),
    SamplingParams(max_tokens=16, temperature=0.7, seed=3, logit_bias={7: 2.0}, min_tokens=9, top_p=0.9, top_k=50),
    SamplingParams(max_tokens=16, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=16, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-z ]+")),
]


def through_bytes(value: Any) -> Any:
    """Serialise and deserialise the value, as for another process. Fails for anything but plain data."""
    if isinstance(value, np.ndarray):
        assert value.dtype in (np.uint8, np.int32, np.int64, np.uint64, np.float32, np.float64)
        return np.frombuffer(bytearray(value.tobytes()), dtype=value.dtype.name).reshape(value.shape)
    if isinstance(value, msgspec.Struct):
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    if is_dataclass(value):
        return type(value)(**{f.name: through_bytes(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, Mapping):
        assert all(type(key) is str for key in value)
        return {key: through_bytes(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [through_bytes(item) for item in value]
    assert value is None or type(value) in (bool, int, float, str), value
    return value


class Distant:
    """An executor that gets and returns only bytes."""

    def __init__(self, local: LocalExecutor) -> None:
        self.local, self.spec, self.plans = local, local.spec, []  # type: ignore[var-annotated]
        self.copy_page, self.close = local.copy_page, local.close

    def execute(self, plan: StepPlan, written: Any = None) -> Any:
        self.plans.append(plan)
        return through_bytes(self.local.execute(through_bytes(plan)))

    def draft(self, plan: DraftPlan) -> Any:
        self.plans.append(plan)
        return through_bytes(self.local.draft(through_bytes(plan)))


def answers(engine: Stepped) -> list[Any]:
    asked = [request(str(i), *both) for i, both in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    streams = [engine.add(one) for one in asked]
    while not all(stream.ended for stream in streams):
        engine.step()
    return [(stream.result, stream.accepted) for stream in streams]


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_plans_and_results_may_travel(verifier: str) -> None:
    settings = {"speculative_config": SpeculativeConfig.parse({**EAGLE3, "verifier": verifier})}
    with stepped(**settings) as here, stepped(**settings) as there:
        local = there.core.executor
        assert isinstance(local, LocalExecutor)
        there.core.steps.executor = distant = Distant(local)  # type: ignore[assignment]
        expected = answers(here)
        assert answers(there) == expected
        assert any(sum(accepted) for _, accepted in expected)
        sampled = [plan for plan in distant.plans if isinstance(plan, StepPlan) and plan.sampling is not None]
        assert any(isinstance(plan, DraftPlan) for plan in distant.plans)
        assert sampled
        assert not any(len(plan.feature_rows) for plan in sampled)


def test_a_result_brings_logits_and_features_of_the_rows_asked_for() -> None:
    with stepped() as engine:
        executor = engine.core.executor
        assert isinstance(executor, LocalExecutor)
        pages = {name: [1, 2] for name in executor.spec.target_groups}
        rows = one_request(PROMPTS[0], pages)
        asked = np.array([3, 20, 23])
        result = executor.execute(StepPlan(rows, asked, logit_rows=np.array([0, 2]), feature_rows=np.array([22, 23])))
        output = executor.runner.forward(rows)
        logits = executor.runner.logits(output, asked)
        assert result.choices.tolist() == logits.argmax(-1).tolist()
        assert torch.equal(torch.from_numpy(result.logits), logits[[0, 2]])
        features = executor.runner.features(output)
        assert features is not None
        assert torch.equal(torch.from_numpy(result.features), features[[22, 23]].float())
        nothing = executor.execute(StepPlan(rows, np.array([], dtype=np.int64)))
        assert (len(nothing.choices), len(nothing.logits), len(nothing.features)) == (0, 0, 0)


def test_a_plan_says_of_greedy_requests_nothing_more_than_their_rows() -> None:
    states = [SamplingState(params, prompt, 100, [0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert [state.plain_greedy for state in states] == [True, False, False, False, False]
    assert SamplingState(SamplingParams(temperature=0.0, logprobs=1), [1], 100, [0]).plain_greedy
    assert sampling_of([], False) is None
    sampling = sampling_of([SamplingRows(states[3], 4, [8, 9]), SamplingRows(states[2], 9, [])], False)
    assert sampling is not None
    assert sampling.row.tolist() == [4, 5, 6, 9]
    assert sampling.draft.tolist() == [8, 9, -1, -1]
    assert sampling.position.tolist() == [50, 51, 52, 1]
    # After a draft, penalties count it.
    last = sampling.counts.row == 2
    assert dict(zip(sampling.counts.token[last], sampling.counts.value[last], strict=True)) == {
        **dict.fromkeys(PROMPTS[3], 0.0), 8: 1.0, 9: 1.0,
    }  # fmt: skip
