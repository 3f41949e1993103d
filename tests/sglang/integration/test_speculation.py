"""Drafters through the handoff: tokens, and how many drafts are accepted, are those of one SGLang."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.sglang.servers import (
    ROOT,
    Config,
    Mode,
    Pair,
    Server,
    ask,
    demo_prompts,
    pair_configs,
    serve,
    session,
    ticket_key,
)

pytestmark = pytest.mark.timeout(1800)
NUM = 40
# A file; while it exists, D does not ask for the drafter's last entry (`support/sgl_kernel/plugin.py`).
FAULT = "boundary"


@dataclass(frozen=True, slots=True)
class Method:
    """SGLang's `algorithm` over a demo `target`. `head`: the demo's checkpoint of it; None: in the target's."""

    algorithm: str
    target: str
    head: str | None


METHODS = {
    "EAGLE-3": Method("EAGLE3", "baton-demo-llama", "baton-demo-eagle3"),
    "EAGLE": Method("EAGLE", "baton-demo-llama", "baton-demo-eagle"),
    "MTP over latents": Method("NEXTN", "baton-demo-deepseek", None),
    "EAGLE-3 over latents": Method("EAGLE3", "baton-demo-deepseek", "baton-demo-deepseek-eagle3"),
}


def drafter(folder: Path, head: str) -> Path:
    """The demo's head as SGLang reads it: EAGLE-3 with the layers of its features where SGLang looks, and counted as
    SGLang does; EAGLE with SGLang's name, and the bias that SGLang's module has."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module", params=METHODS.values(), ids=METHODS)
def servers(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Pair, Server]]:
    method: Method = request.param
    flags = ["--speculative-algorithm", method.algorithm]
    if method.head is not None:
        flags += ["--speculative-draft-model-path", str(drafter(folder, method.head))]
    flags += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    prefill, decode = pair_configs(folder, both=flags)
    decode = replace(decode, environment={"BATON_TEST_FAULT": str(folder / FAULT)})
    with serve(folder, [prefill, decode, Config("one", flags)], ROOT / "models" / method.target) as (p, d, one):
        yield Pair(p, d, ticket_key(folder)), one


def acceptance(answer: dict[str, Any]) -> dict[str, Any]:
    """SGLang's figures of a request's speculation."""
    return {name: value for name, value in answer["meta_info"].items() if name.startswith("spec_")}


async def compare(pair: Pair, one: Server, mode: Mode, seed: int) -> tuple[int, list[int]]:
    """How many drafts `one` accepted, and the lengths of the prompts for which the pair accepted another number."""
    accepted, differing = 0, []
    async with session() as http:
        for prompt in demo_prompts([5, 16, 17, 33, 64, 90], seed):
            want = await ask(http, one, prompt, NUM)
            legs = pair.legs(prompt, mode)
            _, found = await asyncio.gather(
                *(ask(http, server, prompt, NUM, **legs) for server in (pair.prefill, pair.decode))
            )
            assert found["output_ids"] == want["output_ids"], f"{len(prompt)} tokens"
            accepted += NUM - want["meta_info"]["spec_verify_ct"]
            if acceptance(found) != acceptance(want):
                differing.append(len(prompt))
    return accepted, differing


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_drafter_goes_on_as_on_one_server(servers: tuple[Pair, Server], mode: Mode) -> None:
    accepted, differing = asyncio.run(compare(*servers, mode, seed=1 if mode == "push" else 2))
    assert not differing
    assert accepted > 0, "no draft was accepted, so equal figures would prove nothing"


def test_a_drafters_entry_that_stays_behind_is_found(servers: tuple[Pair, Server], folder: Path) -> None:
    """Field class B: tokens are right whatever the drafter knows, so that only acceptance tells. D must not have the
    entry from an earlier handoff, so the prompts are new."""
    (folder / FAULT).touch()
    try:
        _, differing = asyncio.run(compare(*servers, "push", seed=3))
    finally:
        (folder / FAULT).unlink()
    assert differing
