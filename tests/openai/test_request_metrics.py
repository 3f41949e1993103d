"""The `metrics` object of answers, as in vLLM: with and without streaming, and only if requested."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.openai.request_metrics import NO_METRICS, PerRequestMetrics
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, K, served

ALL = PerRequestMetrics(True, "detailed")
TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


async def ask(directory: Path, wanted: PerRequestMetrics, **body: Any) -> Any:
    """The `metrics` of an answer, streamed if the body says so; None if it has none."""
    engine = FakeEngine(directory, step_s=0.002, queued_s=0.25)
    app = build_app(engine, Tokenizer.load(directory), per_request=wanted)
    async with served(app) as url, aiohttp.ClientSession() as session:
        client = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 14, **body}
        async with session.post(f"{url}/v1/chat/completions", json=client) as response:
            assert response.status == 200
            if not body.get("stream"):
                return (await response.json()).get("metrics")
            text = await response.text()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert not any("metrics" in event for event in events[:-1])
        return events[-1].get("metrics")


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("more", [{}, STREAM], ids=["whole", "streamed"])
async def test_metrics_of_a_speculative_request(directory: Path, more: dict[str, Any]) -> None:
    metrics = await ask(directory, ALL, **more)
    assert set(metrics) == {*TIMES, "speculative_decoding"}
    # The first token comes alone; then each round accepts two drafts and adds one token.
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": pytest.approx(1 + 10 / 5),
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 5, 0],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 10,
        "num_spec_tokens": K,
        "first_verification": {"num_accepted_draft_tokens": 2, "num_draft_tokens": 2},
        "later_verifications": {"num_accepted_draft_tokens": 8, "num_draft_tokens": 8},
        "per_step_accepted": [2] * 5,
        "per_step_drafted": [2] * 5,
    }
    assert metrics["queue_time_ms"] == 250.0
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 13)
    whole_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert math.isclose(metrics["tokens_per_second"], 14 / whole_ms * 1e3, rel_tol=1e-9)


async def test_only_what_was_asked(directory: Path) -> None:
    assert await ask(directory, NO_METRICS) is None
    assert await ask(directory, NO_METRICS, **STREAM) is None
    assert set(await ask(directory, PerRequestMetrics(True))) == TIMES
    (summary,) = (await ask(directory, PerRequestMetrics(False, "summary"))).values()
    assert "per_step_accepted" not in summary
    assert summary["acceptance_histogram"] == [0, 0, 5, 0]
    assert await ask(directory, ALL, n=2) is None
    # Without the usage event a stream has no place for them.
    assert await ask(directory, ALL, stream=True) is None


async def test_an_answer_of_one_token(directory: Path) -> None:
    metrics = await ask(directory, ALL, max_tokens=1)
    assert metrics["mean_itl_ms"] is None
    assert metrics["generation_time_ms"] == 0
    told = metrics["speculative_decoding"]
    assert (told["num_spec_steps"], told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (0, 1.0, 0.0)
