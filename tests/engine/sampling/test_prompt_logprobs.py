"""Logprobs of a prompt's tokens: those of transformers, with any chunks, and with any other requests running."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.llm import LLM
from baton.engine.request_checks import make_request
from baton.engine.sampling.prompt_logprobs import prompt_logprobs
from baton.engine.step_plans import PromptLogprobRows
from baton.errors import RequestError
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, TokenChunk, TokenLogprobs
from testkit.engines import EAGLE3, TARGET
from testkit.inside import engine_of

PROMPT = [int(i) for i in np.random.default_rng(0).integers(5, 2000, 150)]
NUM_TOP = 3


def scored(llm: LLM, max_tokens: int, beside: int = 0, prompt: list[int] = PROMPT) -> list[TokenLogprobs | None]:
    """The logprobs of a prompt, while other requests run."""
    core, chunks = engine_of(llm).core, list[TokenChunk]()
    core.emit = core.steps.emit = lambda chunk, last: chunks.append(chunk)
    own = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=NUM_TOP, ignore_eos=True)
    requests = [("own", prompt, own)]
    for number in range(beside):
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        requests.append((str(number), PROMPT[: 40 + number], params))
    for name, tokens, params in requests:
        wire = GenerateRequest(request_id=name, prompt_token_ids=tokens, sampling_params=params)
        core.add(make_request(engine_of(llm), wire))
    while core.scheduler.has_work:
        core.step()
    assert not core.requests
    told = [chunk for chunk in chunks if chunk.request_id == "own"]
    assert sum(len(chunk.token_ids) for chunk in told) == max_tokens
    (found,) = [chunk.prompt_logprobs for chunk in told if chunk.prompt_logprobs is not None]
    return found


def test_scores_are_those_of_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].double(), dim=-1)
    settings = {"dtype": "float32", "kv_cache_memory": 32 << 20, "batch_invariant": True}
    with LLM(TARGET, **settings) as llm:
        whole = scored(llm, 0)
        assert whole[0] is None
        for position, score in enumerate(whole[1:], 1):
            assert score is not None
            row, token = wanted[position - 1], PROMPT[position]
            assert score.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [i for i, _ in score.top] == row.topk(NUM_TOP).indices.tolist()
            assert score.rank == int((row > row[token]).sum()) + 1
        # With a cached prefix of it, and with others beside it.
        assert scored(llm, 2) == whole
        assert scored(llm, 2, beside=3) == whole
        assert scored(llm, 0, prompt=PROMPT[:1]) == [None]
    with LLM(TARGET, **settings, max_num_batched_tokens=32, speculative_config=EAGLE3) as llm:
        assert scored(llm, 0) == whole
        assert scored(llm, 5, beside=2) == whole
    # After a preemption it computes its prompt again.
    with LLM(TARGET, **{**settings, "kv_cache_memory": 4 << 20}, max_model_len=200, max_num_seqs=4) as llm:
        assert scored(llm, 30, beside=3) == whole


def test_equal_scores_are_told_in_the_order_of_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    one, other = prompt_logprobs(logits, PromptLogprobRows(np.array([0, 1]), np.array([4, 3]), np.array([2, 9])))
    assert [i for i, _ in one.top] == [1, 2]
    assert (one.rank, other.rank) == (1, 1)
    assert [i for i, _ in other.top] == [0, 1, 2, 3, 4]
    assert other.logprob == pytest.approx(-np.log(5))


def test_prompt_logprobs_out_of_range_are_refused_by_name() -> None:
    SamplingParams(max_tokens=0, prompt_logprobs=0).check(100)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
        (SamplingParams(prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_name(params: Any, name: str) -> None:
    with pytest.raises(RequestError) as refused:
        params.check(100)
    assert refused.value.param == name
