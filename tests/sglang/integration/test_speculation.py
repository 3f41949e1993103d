"""EAGLE-3 through the handoff: tokens, and how many drafts are accepted, are those of one SGLang."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[Pair, Server]]:
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter(folder))]
    flags += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    prefill, decode = pair_configs(folder, both=flags)
    decode = replace(decode, environment={"BATON_TEST_FAULT": str(folder / FAULT)})
    with serve(folder, [prefill, decode, Config("one", flags)]) as (p, d, one):
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
def test_eagle3_goes_on_as_on_one_server(servers: tuple[Pair, Server], mode: Mode) -> None:
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
