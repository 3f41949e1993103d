"""MTP of several modules. vLLM's V1 runner drafts with the first one alone, so there the connector hands it off. The V2
runner drafts with each, and would compute received entries again from another request's: there it is refused.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.vllm.answers import Answer
from testkit.vllm.checkpoints import glm4_moe
from testkit.vllm.checks import alone_in_turn
from testkit.vllm.limits.module_rows import NUM_DRAFTS, PROMPT, tokens_of
from testkit.vllm.servers import Server, demo_prompts, serve

pytestmark = pytest.mark.timeout(1800)

SPEC = {"method": "mtp", "num_speculative_tokens": 4}
PROMPTS = demo_prompts([20, 33, 50, 64, 90, 130], seed=71)
NUM_LAYERS = 3


def poison(folder: Path, module: int) -> None:
    """Make all weights of a module NaN."""
    prefix, file = f"model.layers.{NUM_LAYERS + module}.", folder / "model.safetensors"
    weights = load_file(file)
    names = [name for name in weights if name.startswith(prefix)]
    assert names
    save_file(weights | {name: torch.full_like(weights[name], torch.nan) for name in names}, file, {"format": "pt"})


def test_only_the_first_module_drafts_in_the_v1_runner(tmp_path: Path) -> None:
    """So there are no entries of later ones, which would depend on tokens after the prompt."""
    poisoned: dict[str, int | None] = {"WHOLE": None, "FIRST": 0, "LATER": 1}
    for name, module in poisoned.items():
        glm4_moe(tmp_path / name / "model", num_modules=2)
        if module is not None:
            poison(tmp_path / name / "model", module)
    configs = [(name, "kv_both", ["--model", str(tmp_path / name / "model")]) for name in poisoned]
    ask = functools.partial(alone_in_turn, prompts=PROMPTS, num=20)

    async def all_of(servers: list[Server]) -> list[list[Answer]]:
        return await asyncio.gather(*(ask(server) for server in servers))

    with serve(tmp_path, configs, {}, SPEC, tmp_path / "WHOLE" / "model") as servers:
        found = asyncio.run(all_of(servers))
    whole, first, later = ([each.tokens for each in of] for of in found)
    assert whole == first == later
    drafts = [[list(each.accepted) for each in of] for of in found]
    assert sum(map(sum, drafts[0])) >= len(PROMPTS)
    assert drafts[2] == drafts[0] != drafts[1]


def test_the_v2_runner_would_compute_received_entries_again_from_another_request() -> None:
    command = [sys.executable, "-m", "testkit.vllm.limits.module_rows"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # A request that it has computed itself: the rows kept of its last step, and that of the verified token.
    positions = range(PROMPT - NUM_DRAFTS + 1, PROMPT + 1)
    rows = {name: [row[name] for row in found["computed"]] for name in ("position", "state", "token")}
    assert rows["position"] == [*positions]
    assert rows["state"] == tokens_of(1, positions)
    assert rows["token"] == tokens_of(1, [position + 1 for position in positions])
    *kept, last = found["received"]
    assert last == {"position": PROMPT - 1, "state": tokens_of(2, [PROMPT - 1])[0], "token": tokens_of(2, [PROMPT])[0]}
    # Places that the prefill server has filled.
    assert [row["position"] for row in kept] == [*range(PROMPT - NUM_DRAFTS, PROMPT - 1)]
    theirs = tokens_of(1, [PROMPT - 1, PROMPT])
    assert [row["state"] for row in kept] == theirs, "vLLM has mended it: see support._check_modules"
