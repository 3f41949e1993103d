"""In bfloat16 the kinds of models are as near to float32 as transformers is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.sampling_params import SamplingParams
from benchmarks.parity.models import TARGETS, MakeTarget, written
from testkit.engines import random_prompt, stepped

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
# One key, and several windows, entries, and choices of an indexer.
PROMPTS = [random_prompt(length) for length in (2, 30, 90)]
SCORES = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
KINDS: dict[str, MakeTarget] = {
    **{
        name: TARGETS[name]
        for name in (
            *("deepseek_v32", "glm_moe_dsa", "qwen3_5_text", "qwen3_next", "kimi_linear"),
            *("minimax_m2", "nemotron_h", "deepseek_v4"),
        )
    },
    "mixtral": written("mixtral"),
    "phi3": written("phi3"),
}


def reference(path: Path, is_wide: bool) -> Any:
    """In float32 (`is_wide`) or bfloat16, with weights rounded to bfloat16."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="eager", local_files_only=True
    )
    return model.float() if is_wide else model


@torch.inference_mode()
def scores(model: Any) -> Tensor:
    """The log-probabilities of the prompts' tokens after the first."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        logits = model(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(logits.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("name", KINDS)
def test_rounding_costs_no_more_than_in_transformers(name: str, tmp_path: Path) -> None:
    path = KINDS[name](tmp_path, 5)
    exact, theirs = scores(reference(path, is_wide=True)), scores(reference(path, is_wide=False))
    with stepped(model=str(path), speculative_config=None, dtype="bfloat16", kv_cache_memory=8 << 20) as one:
        streams = one.all_of(PROMPTS, SCORES)
    told = [stream.chunks[0].prompt_logprobs or [] for stream in streams]
    ours = torch.tensor([entry.logprob for entries in told for entry in entries if entry is not None])
    assert ours.shape == exact.shape
    assert exact.std() > 0.3
    error = (theirs - exact).abs().mean()
    assert 0 < error < 0.2 * exact.std()
    assert (ours - exact).abs().mean() < 1.5 * error
