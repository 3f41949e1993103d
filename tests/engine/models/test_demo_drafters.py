"""The trained demo targets through handoffs with their drafters: latents and experts, delta nets, blocks of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.engine.config import SpeculativeConfig
from baton.sampling_params import SamplingParams
from testkit.engines import Mode, Stream, note_drafts, pair, stepped
from tools.demo_training.blocks import load_block_head
from tools.demo_training.heads import look
from tools.demo_training.hybrid import load_hybrid, load_hybrid_mtp
from tools.demo_training.measure import draft
from tools.demo_training.target import generate_rows, load_target

# By name: the target, and its drafter.
DEMOS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek, mtp": ("baton-demo-deepseek", {"method": "mtp"}),
    "deepseek, eagle3": ("baton-demo-deepseek", {"method": "eagle3", "model": "models/baton-demo-deepseek-eagle3"}),
    "hybrid, mtp": ("baton-demo-hybrid", {"method": "mtp"}),
    "llama, dflash": ("baton-demo-llama", {"method": "dflash", "model": "models/baton-demo-dflash"}),
}
QUESTIONS = ("What does str.split do?", "Explain loops.", "Tell me about generators in Python.", "What is os.path for?")
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


def rates(streams: list[Stream]) -> list[float]:
    """The share of rounds that accepted the draft of each position."""
    rounds = [accepted for stream in streams for accepted in stream.accepted]
    return [sum(accepted > position for accepted in rounds) / len(rounds) for position in range(3)]


def settings_of(name: str) -> dict[str, Any]:
    target, config = DEMOS[name]
    spec = SpeculativeConfig.parse(json.dumps({**config, "num_speculative_tokens": 3}))
    return {"model": f"models/{target}", "speculative_config": spec}


def prompts_of(settings: dict[str, Any]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(f"{settings['model']}/tokenizer.json")
    chats = [f"<|bos|><|user|>{question}<|assistant|>" for question in QUESTIONS]
    return [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]


@pytest.mark.parametrize("name", DEMOS)
def test_a_handoff_keeps_what_the_trained_drafters_get_accepted(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    prompts = prompts_of(settings)
    with stepped(**settings) as single, pair(tmp_path, max_num_batched_tokens=32, **settings) as two:
        whole = [single.run(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
        assert rates(whole)[0] >= 0.4
        modes: tuple[Mode, Mode] = ("push", "pull")
        for mode in modes:
            legs = [two.legs(f"{mode}-{i}", prompt, GREEDY, mode) for i, prompt in enumerate(prompts)]
            two.step_until(lambda legs=legs: all(told.ended and rest.ended for told, rest in legs), limit_s=300.0)
            two.settle()
            for one, (_, rest) in zip(whole, legs, strict=True):
                assert rest.result == one.result
                assert rest.accepted == one.accepted
        # D would recompute a failed handoff and give the same answer.
        assert not two.decode.core.metrics.recoveries
        assert two.decode.core.metrics.num_handoffs["committed"] == 2 * len(prompts)


@pytest.mark.parametrize("name", ["hybrid, mtp", "llama, dflash"])
def test_tokens_are_those_of_transformers_and_drafts_those_that_the_card_counts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(name)
    prompt, directory = prompts_of(settings)[0], Path(settings["model"])
    target: Any = load_hybrid(directory) if name == "hybrid, mtp" else load_target(directory)
    head: Any = (
        load_hybrid_mtp(directory)
        if name == "hybrid, mtp"
        else load_block_head(Path("models/baton-demo-dflash"), target.config)
    )
    drafts = note_drafts(monkeypatch)
    with stepped(**settings, dtype="float32") as one:
        tokens = one.run("r", prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)).token_ids
    said = generate_rows(target, torch.tensor([prompt]), 24, torch.zeros(1), 0)
    assert said[0, len(prompt) :].tolist() == tokens
    features = look(target, said, head.aux_layers).features
    wanted = {
        known: draft(head, target, said[0, :known].tolist(), features[:, : known - 1], len(made))
        for known, made in drafts.items()
    }
    assert drafts == wanted
    assert len(drafts) > 5
