"""`baton verify` between running real engines: one engine, and a prefill/decode deployment behind a router."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deployment import Deployment
from testkit.processes.running import run

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
FLAGS = ("--speculative-config", json.dumps(EAGLE3), "--batch-invariant")
LENGTHS = "1,2,15-18,31-33,48"
NUM = 10
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(scope="module")
def reference() -> Iterator[str]:
    with Deployment(TARGET, prefill=0, decode=0, both=1, engine_flags=FLAGS, router=False) as deployment:
        yield deployment.url


CHATS = (
    {"messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "What is a page?"}]},
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " list"}]}],
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
)


def verify(reference: str, *flags: str, lengths: str | None = LENGTHS) -> subprocess.CompletedProcess[str]:
    chosen = ("--lengths", lengths) if lengths else ()
    return run("verify", "--reference", reference, "--max-tokens", "20", *chosen, *flags, limit_s=300)


@pytest.mark.slow
def test_a_deployment_is_identical_to_one_engine_also_by_its_counters(reference: str, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, CHATS)))
    with Deployment(TARGET, engine_flags=FLAGS) as candidate:
        strict = ("--near-tie", "0", "--logprob-tolerance", "1e-5", "--acceptance-tolerance", "0")
        ids = ("--token-range", "3-2000")
        there = ("--candidate", candidate.url)
        by_counters = verify(reference, *there, *strict, *ids, "--candidate-metrics", candidate.decode_urls[0])
        by_answers = verify(reference, *there, TARGET, *strict, "--concurrency", "4")
        by_chats = verify(reference, *there, *strict, "--chat", str(chats), lengths=None)
        refused = verify(reference, *there)
    for result, num in ((by_counters, NUM), (by_answers, NUM), (by_chats, len(CHATS))):
        assert result.returncode == 0, result.stdout + result.stderr
        assert "acceptance candidate: accepted " in result.stdout
        assert result.stdout.endswith(f": equal\nidentical: {num}/{num}\n")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "prompt token ids must be in [0, 2048)" in refused.stdout


@pytest.mark.slow
def test_an_engine_in_this_process_writes_chats_as_a_server_does(reference: str, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, CHATS)))
    flags = (TARGET, "--speculative-config", json.dumps(EAGLE3), "--modes", "single", "--chat", str(chats))
    result = verify(reference, *flags, "--near-tie", "0", lengths=None)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(f": equal\nidentical: {len(CHATS)}/{len(CHATS)}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what"),
    [("drop-draft", "acceptance at draft position"), ("corrupt", "request ")],
    ids=["draft", "target"],
)
def test_a_broken_deployment_is_found(fault: str, what: str, reference: str) -> None:
    """Short prompts' drafts depend little on the handed-over KV."""
    flags = (*FLAGS, "--recovery", "none")
    with Deployment(TARGET, engine_flags=flags, kv_transport=f"faulty+shm://?fault={fault}") as candidate:
        metrics = ("--candidate-metrics", candidate.decode_urls[0])
        result = verify(reference, "--candidate", candidate.url, TARGET, *metrics, lengths="60-75")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"DIFFERENT candidate: {what}" in result.stdout
