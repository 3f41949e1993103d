"""Targets with latents and experts: the tokens of transformers, by one engine and through handoffs, whatever is in the
batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import SpeculativeConfig
from baton.wire import SamplingParams
from tests.engine.engines import Stepped, Stream, request, stepped
from tests.engine.test_transformers_equality import judge, load_reference
from tests.support.checkpoints_moe import SHAPES, make_moe_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 13 * n + i * i) % 200 for i in range(n)] for n in (1, 17, 64, 90)]
ORDINARY = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_moe")
Settings = dict[str, Any]
Make = Callable[..., Path]


def settings_of(target: Path, head: Path | None = None, method: str = "eagle3", **more: Any) -> Settings:
    spec = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    parsed = SpeculativeConfig.parse(json.dumps(spec)) if head else None
    return {"model": str(target), "speculative_config": parsed, "dtype": "float32", **more}


def all_of(one: Stepped, prompts: list[list[int]]) -> list[Stream]:
    streams = [one.add(request(f"{len(one.streams)}", prompt, GREEDY)) for prompt in prompts]
    while not all(stream.ended for stream in streams):
        one.step()
    assert one.is_idle()
    return streams


def tokens_of(settings: Settings, prompts: list[list[int]]) -> list[list[int]]:
    with stepped(**settings) as one:
        return [stream.token_ids for stream in all_of(one, prompts)]


@pytest.mark.parametrize(
    ("shape", "seed"), [*((shape, 1) for shape in sorted(SHAPES)), *((shape, 2) for shape in ORDINARY)]
)
def test_greedy_tokens_are_those_of_transformers(shape: str, seed: int, tmp_path: Path) -> None:
    target = make_moe_checkpoint(tmp_path, shape, seed)
    model = load_reference(target)
    # Expanded prompts and absorbed decoding, then all rows alike; whole prompts, then chunks.
    for invariant, budget in ((False, 2048), (True, 40)):
        settings = settings_of(target, batch_invariant=invariant, max_num_batched_tokens=budget)
        for prompt, got in zip(PROMPTS, tokens_of(settings, PROMPTS), strict=True):
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
            expected = out[0, len(prompt) :].tolist()
            if got != expected:
                is_tie, text = judge(model, prompt, expected, got)
                assert is_tie, (invariant, len(prompt), text)
