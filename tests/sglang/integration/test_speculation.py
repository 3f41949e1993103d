"""EAGLE-3 through the handoff: tokens, and how many drafts are accepted, are those of one SGLang."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.integration.kit.servers import ROOT, Mode, Pair, Server, ask, demo_prompts, serve_pair, session

pytestmark = pytest.mark.timeout(1800)
NUM = 40


def drafter(folder: Path) -> Path:
    """The demo's EAGLE-3 head, with the layers of its features where SGLang reads them, and counted as SGLang does."""
    copy = folder / "eagle3"
    shutil.copytree(ROOT / "models" / "baton-demo-eagle3", copy)
    config = json.loads((copy / "config.json").read_text())
    layers = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Server]]:
    folder = tmp_path_factory.mktemp("eagle3")
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter(folder))]
    flags += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    with serve_pair(folder, both=flags, alone=()) as (pair, one):
        assert one is not None
        yield pair, one


def acceptance(answer: dict[str, Any]) -> dict[str, Any]:
    """SGLang's figures of a request's speculation."""
    return {name: value for name, value in answer["meta_info"].items() if name.startswith("spec_")}


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_eagle3_goes_on_as_on_one_server(servers: tuple[Pair, Server], mode: Mode) -> None:
    pair, one = servers
    seed = 1 if mode == "push" else 2

    async def run() -> None:
        accepted = 0
        async with session() as http:
            for prompt in demo_prompts([5, 16, 17, 33, 64, 90], seed):
                want = await ask(http, one, prompt, NUM)
                legs = pair.legs(prompt, mode)
                _, found = await asyncio.gather(
                    *(ask(http, server, prompt, NUM, **legs) for server in (pair.prefill, pair.decode))
                )
                assert found["output_ids"] == want["output_ids"], f"{len(prompt)} tokens"
                assert acceptance(found) == acceptance(want), f"{len(prompt)} tokens"
                accepted += NUM - want["meta_info"]["spec_verify_ct"]
        assert accepted > 0, "no draft was accepted, so equal figures would prove nothing"

    asyncio.run(run())
