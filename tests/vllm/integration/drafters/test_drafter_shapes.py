"""Drafters whose caches are not like their target's: other head sizes, other numbers of heads and of layers, several
block tables in the target, or no cache at all (Gemma 4's assistant). The prefill server computes prompts in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.vllm.checkpoints import windowed
from testkit.vllm.checks import check_all_are_handed_over
from testkit.vllm.drafters import DRAFTER
from testkit.vllm.drafters.heads import DFLASH, gemma4
from testkit.vllm.drafters.reshaped import with_larger_draft_model, with_smaller_draft_model
from testkit.vllm.servers import Mode, Pair, demo_prompts, serve_pair

pytestmark = pytest.mark.timeout(1800)

FLAGS = ["--block-size", "32", "--max-model-len", "1152"]
CHUNKS = ["--long-prefill-token-threshold", "64"]
SHAPES: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "larger": (with_larger_draft_model, {"method": "draft_model"}),
    "smaller": (with_smaller_draft_model, {"method": "draft_model"}),
    "assistant": (gemma4, {"method": "mtp"}),
    "dflash, windows in the target": (windowed, DFLASH),
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("shapes")
    make, spec = SHAPES[request.param]
    make(folder / "model")
    spec = {"model": str(folder / "model" / DRAFTER), "num_speculative_tokens": 3, **spec}
    with serve_pair(folder, CHUNKS, both=FLAGS, spec=spec, model=folder / "model") as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    lengths = [2, 31, 32, 33, 63, 64, 65, 66, 97, 128, 130, 200, 333]
    check_all_are_handed_over(pair, demo_prompts(lengths, seed=57), 24, mode)
