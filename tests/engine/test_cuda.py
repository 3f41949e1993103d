"""One engine on a GPU. Skipped without one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.llm import LLM, RequestOutput
from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from testkit.engines import EAGLE3, TARGET

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(5, 2000, n)] for n in (1, 2, 15, 16, 17, 70, 300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=40, presence_penalty=0.3, ignore_eos=True)


def generate(params: SamplingParams, device: str, drafts: bool, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run(params, device, drafts, prompts)]


def run(params: SamplingParams, device: str, drafts: bool, prompts: list[list[int]]) -> list[RequestOutput]:
    spec = EAGLE3 if drafts else None
    with LLM(TARGET, device=device, dtype="float32", speculative_config=spec, kv_cache_memory=1 << 28, seed=0) as llm:
        return llm.generate(prompts, params)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_greedy_tokens_equal_transformers_on_the_gpu() -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).cuda().eval()
    model.generation_config.eos_token_id = None
    for prompt, ours in zip(PROMPTS, generate(GREEDY, "cuda", drafts=False), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(params: SamplingParams) -> None:
    plain = generate(params, "cuda", drafts=False)
    outputs = run(params, "cuda", True, PROMPTS)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(sum(output.outputs[0].accepted) for output in outputs) > 20


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_equal_those_of_the_cpu(params: SamplingParams) -> None:
    assert generate(params, "cuda", drafts=True) == generate(params, "cpu", drafts=True)


def test_prefix_hits_and_a_full_pool_change_no_token() -> None:
    shared = PROMPTS[-1]
    prompts = [shared + [7 + n] * n for n in range(12)]
    alone = [generate(GREEDY, "cuda", True, [prompt])[0] for prompt in prompts]
    # Memory for about four of the twelve: the others wait, or are preempted.
    with LLM(
        TARGET, device="cuda", dtype="float32", speculative_config=EAGLE3, kv_cache_memory=12 << 20, max_model_len=400
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert any(output.num_cached_tokens for output in outputs)


def test_a_transport_of_host_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shm does not open memory of cuda"):
        LLM(TARGET, device="cuda", role="decode", ticket_key_file=str(tmp_path / "ticket.key"))
