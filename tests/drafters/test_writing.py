"""Heads of one layer only write the entries of rows that do not draft: the same bits as from whole forwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from baton.drafters.head import HeadDrafter
from baton.engine.config import SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.wire import SamplingParams
from benchmarks.parity.models import DRAFTERS, TARGETS
from testkit.engines import random_prompt, stepped

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def run(settings: dict[str, Any], writes: bool) -> tuple[list[list[int]], list[Tensor], int]:
    """Accepted drafts of each request, the drafter's pages, and the rows of its layer's forwards."""
    rows: list[int] = []
    with stepped(**settings) as one:
        assert isinstance(one.core.executor, LocalExecutor)
        runner = one.core.executor.runner
        drafter = runner.drafter
        assert isinstance(drafter, HeadDrafter)
        assert drafter.writes
        drafter.writes = writes
        layer = drafter.get_submodule("layers.0")
        layer.register_forward_hook(lambda layer, inputs, out: rows.append(len(inputs[0])))
        streams = one.all_of([random_prompt(length) for length in (5, 23, 40)], PARAMS)
        pages = [runner.kv[name].pages.clone() for name in runner.spec.draft_groups]
    return [stream.accepted for stream in streams], pages, sum(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("llama", "eagle"),
        ("qwen3", "eagle3"),
        ("llama", "eagle3, latents"),
        ("deepseek_v3", "mtp"),
        ("glm4_moe", "mtp"),
        ("qwen3_next", "mtp"),
    ],
)
def test_written_entries_are_those_of_a_forward(target: str, drafter: str, dtype: str, tmp_path: Path) -> None:
    model, make = TARGETS[target](tmp_path / "target", 0), DRAFTERS[drafter].make
    assert make is not None
    spec = SpeculativeConfig.parse(json.dumps({**make(tmp_path / "drafter", model, 1), "num_speculative_tokens": 3}))
    settings = {"model": str(model), "speculative_config": spec, "skip_tokenizer_init": True, "dtype": dtype}
    settings |= {"kv_cache_memory": 4 << 20, "max_model_len": 128}
    accepted, pages, few = run(settings, writes=True)
    expected, whole, many = run(settings, writes=False)
    assert accepted == expected
    assert all(found.equal(wanted) for found, wanted in zip(pages, whole, strict=True))
    assert few < many - 60
