"""Gemma 4's assistant on stage 0, which asks other stages to attend to the keys that they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from baton import LLM, SamplingParams, StructuredOutputsParams
from baton.engine.config import SpeculativeConfig
from testkit.checkpoints.gemma4 import WINDOW, make_assistant, make_gemma4
from testkit.disorder import Disorder, Said
from testkit.engines import stepped

pytestmark = pytest.mark.usefixtures("one_thread", "forks")

SETTINGS: dict[str, Any] = {"batch_invariant": True, "kv_cache_memory": 1 << 20, "block_size": 4}
# One token, around the window and several windows.
LENGTHS = (1, WINDOW, WINDOW + 2, 25, 40)
PROMPTS = [[(7 * i * i + 3 * n) % 256 for i in range(n)] for n in LENGTHS]
# Requests end, and their drafts, at different steps. With much shared noise a random drafter is right at times.
GRAMMAR = StructuredOutputsParams(regex="[a-z]{5,20}! [0-9]+")
PARAMS = [
    SamplingParams(
        max_tokens=8 + i,
        temperature=(0.0, 4.0, 8.0)[i % 3],
        seed=i,
        ignore_eos=i != 3,
        structured_outputs=GRAMMAR if i == 3 else None,
    )
    for i in range(len(PROMPTS))
]
Checkpoints = tuple[str, dict[str, Any]]


def made(folder: Path, layers: Sequence[str]) -> Checkpoints:
    types = [f"{kind}_attention" for kind in layers]
    target = make_gemma4(folder / "target", "gemma4-k_is_v", num_hidden_layers=len(types), layer_types=types)
    return str(target), make_assistant(folder / "assistant", target)


def answers(checkpoints: Checkpoints, stages: int, ranks: int, **more: Any) -> list[tuple[list[int], list[int]]]:
    target, spec = checkpoints
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks, "reduction_slices": 2}
    with LLM(target, **{**SETTINGS, "speculative_config": spec, **sizes, **more}) as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    return [(r.outputs[0].token_ids, r.outputs[0].accepted) for r in found]


@pytest.mark.parametrize(
    ("layers", "stages", "dtype"),
    [
        (["sliding", "full"], 2, "float32"),  # each stage has one kind of layer
        (["sliding", "full"], 2, "bfloat16"),
        (["full", "sliding", "sliding", "full"], 2, "bfloat16"),  # stage 0 is not read
        (["sliding", "full", "full"], 3, "float32"),  # stage 1 is not read
    ],
)
def test_keys_on_other_stages_give_the_same_drafts(layers: list[str], stages: int, dtype: str, tmp_path: Path) -> None:
    checkpoints = made(tmp_path, layers)
    one = answers(checkpoints, 1, 1, dtype=dtype)
    assert any(sum(accepted) for _, accepted in one)
    # Whole prompts, then chunks beside verifications.
    assert answers(checkpoints, stages, 1, dtype=dtype) == one
    assert answers(checkpoints, 2, 2, dtype=dtype, max_num_batched_tokens=7) == one


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (2, 2)])
def test_requests_in_disorder_get_what_they_get_alone(stages: int, ranks: int, tmp_path: Path) -> None:
    """Aborts, preemptions, chunks, prefix hits, and too little room in a step or in memory."""
    target, spec = made(tmp_path, ["sliding", "full", "sliding", "full"])
    settings = {**SETTINGS, "model": target, "speculative_config": SpeculativeConfig.parse(spec), "reduction_slices": 2}
    params = [replaced(one, max_tokens=20) for one in PARAMS]
    with stepped(**settings) as one:
        wanted = [Said(p, q, one.run(f"{i}", p, q)) for i, (p, q) in enumerate(zip(PROMPTS, params, strict=True))]
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks, "kv_cache_memory": 1 << 17}
    with stepped(**{**settings, **sizes}) as one:
        disorder = Disorder(one, wanted, 3, 5)
        for _ in range(150):
            disorder.step()
        assert min(disorder.num_ended, disorder.num_preempted) > 9


def test_the_engine_chooses_k(tmp_path: Path) -> None:
    """It measures drafts of spare pages before there is a request."""
    target, spec = made(tmp_path, ["sliding", "full"])
    expected = [tokens for tokens, _ in answers((target, spec), 1, 1)]
    found = answers((target, {**spec, "num_speculative_tokens": "auto"}), 2, 1)
    assert [tokens for tokens, _ in found] == expected
