"""`baton verify` over real processes: identical where nothing is broken, and every fault put in on purpose is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from leftovers import orphaned_segments

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5
LENGTHS = "1,2,15-18,31-33,47-49,80,96"
NUM_CASES = 14


def verify(*flags: str, lengths: str = LENGTHS, speculation: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli", "verify", TARGET, "--lengths", lengths, "--max-tokens", "20", *flags]
    if speculation:
        command += ["--speculative-config", json.dumps(EAGLE3)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)
    assert not orphaned_segments()
    return result


@pytest.mark.parametrize(
    "flags",
    [
        ("--modes", "push,pull,single-nospec"),
        ("--temperature", "0.8", "--seed", "7", "--modes", "push,pull"),
        ("--block-size", "7", "--max-num-batched-tokens", "48", "--modes", "push,pull"),
        ("--prefill-block-size", "16", "--decode-block-size", "32", "--modes", "push"),
        ("--prefill-block-size", "32", "--decode-block-size", "16", "--modes", "pull"),
        ("--concurrency", "8", "--kv-cache-memory", str(20 * PAGE_BYTES), "--modes", "push,pull"),
        ("--prefill", "2", "--decode", "2", "--concurrency", "4", "--modes", "push"),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_deployment_is_identical_to_one_engine(flags: tuple[str, ...]) -> None:
    result = verify(*flags)
    assert result.returncode == 0, result.stdout + result.stderr
    num_modes = len(flags[flags.index("--modes") + 1].split(","))
    assert result.stdout.endswith(f"identical: {num_modes * NUM_CASES}/{num_modes * NUM_CASES}\n")


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    "fault", ["drop", "drop-draft", "shift-page", "corrupt", "drop-last-page", "stale-seed", "fail"]
)
def test_broken_handoffs_are_found(fault: str, mode: str) -> None:
    result = verify("--kv-transport", f"faulty+shm://?fault={fault}", "--modes", mode, lengths="31-34,60-63")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"DIFFERENT {mode}: request " in result.stdout
    if fault == "drop-draft":
        # Verification guards the tokens; only acceptance can tell.
        assert "acceptance of round" in result.stdout
        assert "expected" in result.stdout
