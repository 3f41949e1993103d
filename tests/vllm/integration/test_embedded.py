"""Baton's own engine against vLLM on the same checkpoints, fp32: equal tokens, and equal accepted drafts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, VllmServer, serve
from testkit.checkpoints.common import make_checkpoint
from testkit.vllm.servers import EAGLE3, MODEL, demo_prompts

pytestmark = pytest.mark.timeout(1800)

# Every residue of a block, block boundaries, several chunks, and with 32 new tokens the end of the context.
LENGTHS = [1, 2, 3, *range(33, 98), 500, 1000, 2050, 3000, 4064]
FEWER = [length for length in LENGTHS if not 65 < length < 98]
NUM_TOKENS = 32


def verify(
    folder: Path, model: Path, server: VllmServer, prompts: Sequence[Sequence[int]], *flags: str
) -> dict[str, Any]:
    """The report of `baton verify` with vLLM as the reference and one Baton engine as the candidate."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": list(prompt)}) + "\n" for prompt in prompts))
    command = [sys.executable, "-m", "baton.cli", "verify", str(model), "--reference", server.url, "--modes", "single"]
    command += ["--prompts", str(file), "--max-tokens", str(NUM_TOKENS), "--ignore-eos", "--dtype", "float32"]
    result = subprocess.run(
        [*command, "--json", *flags],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.stdout, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)[0]
    print(
        {name: report[name] for name in ("requests", "identical", "near_ties", "max_logprob_difference")}
        | {name: report[name] for name in ("counts", "reference_counts")}
    )
    assert report["differences"] == []
    assert result.returncode == 0, report["acceptance_problem"]
    return report


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": SCALED | {"original_max_position_embeddings": 512}},
    "mistral": {"sliding_window": 64},
    "qwen3": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_random_models_answer_as_one_vllm_server(model_type: str, tmp_path: Path) -> None:
    """Grouped heads, windows, rotary scaling, tied embeddings, norms of queries and keys."""
    sizes = {"head_dim": 32, "hidden_size": 128, "max_position_embeddings": 4096}
    model = make_checkpoint(tmp_path / "model", model_type, **sizes, **MODELS[model_type])
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in FEWER]
    with serve(sys.executable, str(model), tmp_path, [ServerConfig("vllm", ONE_PROCESS)]) as (server,):
        report = verify(tmp_path, model, server, prompts)
    assert report["identical"] + len(report["near_ties"]) == len(FEWER)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    eagle3 = [*ONE_PROCESS, "--speculative-config", json.dumps(EAGLE3)]
    configs = [ServerConfig("plain", ONE_PROCESS), ServerConfig("eagle3", eagle3)]
    with serve(sys.executable, str(MODEL), tmp_path_factory.mktemp("vllm"), configs) as found:
        yield {server.name: server for server in found}


def test_the_demo_model_answers_as_one_vllm_server(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    report = verify(tmp_path, MODEL, servers["plain"], demo_prompts(LENGTHS, seed=7))
    assert report["identical"] + len(report["near_ties"]) == len(LENGTHS)


def test_demo_model_with_eagle3(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    """Two differences come from vLLM. After the end of a prompt's chunk its drafter's entry comes from the prompt's
    last token instead of the next one, which may change the drafts after a chunk: those of 2,050 tokens. And it stops
    drafting a few tokens before the context ends: 4,064.
    """
    spec = ("--speculative-config", json.dumps(EAGLE3), "--reference-metrics", servers["eagle3"].url)
    report = verify(tmp_path, MODEL, servers["eagle3"], demo_prompts(LENGTHS, seed=7), *spec)
    assert report["acceptance_compared"]
    assert report["reference_acceptance"][0] > 0.3
