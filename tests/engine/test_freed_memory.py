"""Engines in bfloat16 with freed memory overwritten: reading freed memory would change tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from baton import LLM, SamplingParams
from testkit.checkpoints.common import make_checkpoint
from testkit.checkpoints.moe import make_moe_checkpoint

PROMPTS = [[1, 2, 3], [9] * 70, [5, 4, 3, 2] * 20, [8]]
# glibc overwrites freed memory, and a single arena reuses it at once, on any thread.
OVERWRITTEN = {"MALLOC_PERTURB_": "85", "MALLOC_ARENA_MAX": "1"}


def said(path: str) -> list[list[int]]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(path, batch_invariant=True, kv_cache_memory=8 << 20) as llm:
        return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_no_token_comes_from_freed_memory(tmp_path: Path) -> None:
    # Heads of 32 elements use bfloat16 dot products.
    paths = [
        make_checkpoint(tmp_path / "llama", "llama", head_dim=32, torch_dtype="bfloat16"),
        make_moe_checkpoint(tmp_path / "deepseek", "deepseek_v3", torch_dtype="bfloat16"),
    ]
    command = [sys.executable, "-m", "tests.engine.test_freed_memory", *map(str, paths)]
    done = subprocess.run(command, env={**os.environ, **OVERWRITTEN}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [said(str(path)) for path in paths]


if __name__ == "__main__":
    print(json.dumps([said(path) for path in sys.argv[1:]]))
