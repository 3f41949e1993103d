"""MTP of several modules, of which vLLM's V1 runner runs the first alone. So `BatonConnector` hands it off: entries of
later modules would depend on tokens after the prompt.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.vllm.answers import Answer
from testkit.vllm.checkpoints import glm4_moe
from testkit.vllm.checks import alone
from testkit.vllm.servers import demo_prompts, serve

pytestmark = pytest.mark.timeout(1800)

SPEC = {"method": "mtp", "num_speculative_tokens": 4}
PROMPTS = demo_prompts([20, 33, 50, 64, 90, 130], seed=71)
NUM_LAYERS = 3


def answers(folder: Path, poisoned: int | None) -> list[Answer]:
    """One vLLM's. All weights of module `poisoned` are NaN."""
    glm4_moe(folder / "model", num_modules=2)
    if poisoned is not None:
        prefix, file = f"model.layers.{NUM_LAYERS + poisoned}.", folder / "model" / "model.safetensors"
        weights = load_file(file)
        names = [name for name in weights if name.startswith(prefix)]
        assert names
        save_file(weights | {name: torch.full_like(weights[name], torch.nan) for name in names}, file, {"format": "pt"})
    with serve(folder, [("ONE", "kv_both", [])], {}, SPEC, folder / "model") as (one,):
        return asyncio.run(alone(one, PROMPTS))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return answers(tmp_path_factory.mktemp("whole"), None)


@pytest.mark.parametrize(("poisoned", "same"), [(0, False), (1, True)])
def test_only_the_first_module_drafts(tmp_path: Path, expected: list[Answer], poisoned: int, same: bool) -> None:
    found = answers(tmp_path, poisoned)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    drafts = [[list(each.accepted) for each in of] for of in (found, expected)]
    assert sum(map(sum, drafts[1])) >= len(PROMPTS)
    assert (drafts[0] == drafts[1]) == same
