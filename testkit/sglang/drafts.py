"""The demo's drafters as SGLang reads them, and how many drafts servers accepted."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.wire import Mode
from testkit.sglang.launch import ROOT
from testkit.sglang.servers import Pair, Server, ask, session

NUM_DRAFTS = 3
Prompts = Sequence[Sequence[int]]


def drafter(folder: Path, head: str) -> Path:
    """The demo's head as SGLang reads it: EAGLE-3 with the layers of its features where SGLang looks, and counted as
    SGLang does; EAGLE with SGLang's name, and the bias that SGLang's module has."""
    import torch
    from safetensors.torch import load_file, save_file

    copy = folder / head
    shutil.copytree(ROOT / "models" / head, copy)
    config = json.loads((copy / "config.json").read_text())
    if "eagle_aux_hidden_state_layer_ids" in config:
        layers = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    else:
        config["architectures"] = ["LlamaForCausalLMEagle"]
        weights = load_file(copy / "model.safetensors")
        weights["fc.bias"] = torch.zeros_like(weights["fc.weight"][:, 0])
        save_file(weights, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def draft_flags(algorithm: str, head: Path | None) -> list[str]:
    """`head`: None if it is in the target's checkpoint."""
    found = ["--speculative-algorithm", algorithm, "--speculative-num-steps", str(NUM_DRAFTS)]
    found += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(NUM_DRAFTS + 1)]
    return found + (["--speculative-draft-model-path", str(head)] if head is not None else [])


@dataclass(frozen=True, slots=True)
class Compared:
    """`accepted`: the drafts that one server accepted, by position. `differing`: the lengths of the prompts for which a
    pair accepted others."""

    num: int
    accepted: tuple[int, ...]
    differing: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.num - len(self.differing)} of {self.num} as one, which accepted {list(self.accepted)}"


def histogram(answer: dict[str, Any]) -> list[int]:
    """The number of verifications that accepted 0, 1, ... drafts."""
    found: list[int] = answer["meta_info"]["spec_correct_drafts_histogram"]
    return found


async def one_answer(one: Server, prompts: Prompts, num: int) -> list[dict[str, Any]]:
    async with session() as http:
        return [await ask(http, one, prompt, num) for prompt in prompts]


async def compare(pair: Pair, known: Sequence[dict[str, Any]], mode: Mode, prompts: Prompts, num: int) -> Compared:
    """The pair's tokens must be those of `known`, one server's answers."""
    accepted, differing = [0] * NUM_DRAFTS, []
    legs = pair.minter(mode)
    async with session() as http:
        for prompt, want in zip(prompts, known, strict=True):
            more = legs(prompt)
            both = (ask(http, server, prompt, num, **more) for server in (pair.prefill, pair.decode))
            _, answer = await asyncio.gather(*both)
            assert answer["output_ids"] == want["output_ids"], f"{len(prompt)} tokens: {answer}"
            alone = histogram(want)
            for position in range(NUM_DRAFTS):
                accepted[position] += sum(alone[position + 1 :])
            if histogram(answer) != alone:
                differing.append(len(prompt))
    return Compared(len(prompts), tuple(accepted), tuple(differing))
