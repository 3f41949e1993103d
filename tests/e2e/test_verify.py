"""`baton verify` over real processes: a working deployment is identical to one engine."""

from __future__ import annotations

import re

import pytest

from testkit.processes.verifying import verify

SAMPLED = ("--temperature", "0.8", "--seed", "7")
PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5
LENGTHS = "1,15-17,31-33,48,80"
NUM_CASES = 9
# For ranks, which are slow if they share cores; test_topologies.py has more.
RANK_LENGTHS, NUM_RANK_CASES = "1,16,33,48,80", 5
pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.parametrize(
    "flags",
    [
        ("--modes", "push,pull,single-nospec"),
        (*SAMPLED, "--block-size", "7", "--max-num-batched-tokens", "48", "--modes", "push,pull"),
        ("--prefill-block-size", "32", "--decode-block-size", "16", "--modes", "pull"),
        ("--concurrency", "8", "--kv-cache-memory", str(20 * PAGE_BYTES), "--modes", "push,pull"),
        ("--prefill", "2", "--decode", "2", "--concurrency", "4", "--decode-block-size", "32", "--modes", "push"),
        ("--prefill-tensor-parallel-size", "2", "--decode-block-size", "7", "--modes", "push,pull", "--turns", "2"),
        ("--prefill-pipeline-parallel-size", "2", "--decode-tensor-parallel-size", "2", "--modes", "push,pull"),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_deployment_is_identical_to_one_engine(flags: tuple[str, ...]) -> None:
    ranks = any("parallel-size" in flag for flag in flags)
    result = verify(*flags, lengths=RANK_LENGTHS if ranks else LENGTHS)
    assert result.returncode == 0, result.stdout + result.stderr
    modes, turns = len(flags[flags.index("--modes") + 1].split(",")), 1 + ("--turns" in flags)
    num = modes * turns * (NUM_RANK_CASES if ranks else NUM_CASES)
    handed_back = re.findall(r"(\d+) prefixes were handed back", result.stderr)
    assert len(handed_back) == modes * (turns - 1)
    assert "0" not in handed_back
    assert result.stdout.endswith(f"identical: {num}/{num}\n")
