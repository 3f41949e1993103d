"""`baton up --kv-transport`: with every transport the answers are one engine's."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from baton.openai.client import connected_client
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.compare import compare_answers
from baton.verify.observe import REQUEST_TIMEOUT_S, Case, Observed, make_cases, observe_client
from baton.verify.sides import EngineSide
from testkit.handoffs.remote_uris import SCHEMES, uri_of
from testkit.processes.leftovers import orphaned_segments
from testkit.processes.running import END_LIMIT_S, running_up

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
LENGTHS = [*range(1, 36), 47, 48, 49, 80, 96, 257]
FLAGS = [
    *("--speculative-config", json.dumps(EAGLE3), "--batch-invariant", "--no-enable-prefix-caching"),
    # A failed handoff must show: recomputed on the decode engine, it would give the same answer.
    *("--recovery", "none", "--allow-mode-override"),
]
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    return make_cases(Tokenizer.load(TARGET), LENGTHS, params)


@pytest.fixture(scope="module")
def expected(cases: list[Case]) -> list[Observed]:
    return EngineSide({"model": TARGET, "speculative_config": EAGLE3, "batch_invariant": True}).answers(cases).observed


async def ask(url: str, cases: list[Case], mode: str) -> list[Observed]:
    async with connected_client(url, REQUEST_TIMEOUT_S) as client:
        return await observe_client(client, "baton-demo-llama", cases, 4, kv_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("transport", SCHEMES)
def test_answers_are_one_engines(
    transport: str, cases: list[Case], expected: list[Observed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri_of(transport, tmp_path)  # skips if it cannot run here
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with running_up(TARGET, tmp_path / "log", *FLAGS, "--kv-transport", transport) as up:
        for mode in ("push", "pull"):
            have = asyncio.run(ask(up.url, cases, mode))
            report = compare_answers(mode, cases, expected, have)
            assert report.num_identical == len(cases), [str(difference) for difference in report.differences]
        with urllib.request.urlopen(f"{up.url}/status", timeout=60) as response:
            handoffs = json.load(response)["handoffs"]
        assert handoffs["completed"] == 2 * len(cases), handoffs
        assert handoffs["failures"] == {}
        # The directory of `file` belongs to this deployment, and is removed with it.
        assert len(list(temporary.glob("baton-*/kv/*"))) >= (len(cases) if transport == "file" else 0)
        up.process.terminate()
        assert up.process.wait(END_LIMIT_S) is not None
    assert list(temporary.glob("baton-*")) == []
    assert not (tmp_path / "home" / ".cache" / "baton").exists()
    assert not orphaned_segments()
