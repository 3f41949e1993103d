"""The trained DeepSeek-type target through handoffs: latents, experts, its MTP module and a Llama-type head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.engine.config import SpeculativeConfig
from baton.sampling_params import SamplingParams
from testkit.engines import Mode, Stream, pair, stepped

TARGET = "models/baton-demo-deepseek"
DRAFTERS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "models/baton-demo-deepseek-eagle3", "num_speculative_tokens": 3},
}
QUESTIONS = ("What does str.split do?", "Explain loops.", "Tell me about generators in Python.", "What is os.path for?")
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


def rates(streams: list[Stream]) -> list[float]:
    """The share of rounds that accepted the draft of each position."""
    rounds = [accepted for stream in streams for accepted in stream.accepted]
    return [sum(accepted > position for accepted in rounds) / len(rounds) for position in range(3)]


@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_a_handoff_keeps_what_the_trained_drafters_get_accepted(method: str, tmp_path: Path) -> None:
    spec = SpeculativeConfig.parse(json.dumps(DRAFTERS[method]))
    settings: dict[str, Any] = {"model": TARGET, "speculative_config": spec}
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    chats = [f"<|bos|><|user|>{question}<|assistant|>" for question in QUESTIONS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]
    with stepped(**settings) as single, pair(tmp_path, max_num_batched_tokens=32, **settings) as two:
        whole = [single.run(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
        assert rates(whole)[0] >= 0.4
        modes: tuple[Mode, Mode] = ("push", "pull")
        for mode in modes:
            legs = [two.legs(f"{mode}-{i}", prompt, GREEDY, mode) for i, prompt in enumerate(prompts)]
            two.step_until(lambda legs=legs: all(told.ended and rest.ended for told, rest in legs), limit_s=60.0)
            two.settle()
            for one, (_, rest) in zip(whole, legs, strict=True):
                assert rest.result == one.result
                assert rest.accepted == one.accepted
        # D would recompute a failed handoff and give the same answer.
        assert not two.decode.core.metrics.recoveries
        assert two.decode.core.metrics.num_handoffs["committed"] == 2 * len(prompts)
