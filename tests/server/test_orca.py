"""What gateways read of an engine: the load in a header, and the metrics that they scrape."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import msgspec
import pytest

from baton.engine.metrics import EngineMetrics
from baton.openai.client import read_samples
from baton.openai.http.metrics import RowCollector, exposition_text, with_vllm_names
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, load_of, served, write_tokenizer

# What the endpoint picker of llm-d and of the Gateway API's inference extension scrapes, and AIBrix's gateway.
LLM_D = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
AIBRIX = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'),
        ("BIN", None),
        (None, None),
    ],
)
async def test_an_answer_tells_the_load_as_vllm_does(
    tmp_path: Path, form: str | None, expected: str | None, stream: bool
) -> None:
    directory = write_tokenizer(tmp_path / "model")
    engine = FakeEngine(directory)
    engine.load = lambda: msgspec.structs.replace(load_of(1), kv_usage=0.25, num_waiting=3)  # type: ignore[method-assign]
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    async with served(build_app(engine, Tokenizer.load(directory))) as url, aiohttp.ClientSession() as session:
        body = {"prompt": "a", "max_tokens": 2, "stream": stream}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert response.headers.get("endpoint-load-metrics") == expected
        async with session.post(f"{url}/v1/completions", json={"prompt": 1.5}, headers=headers) as response:
            assert response.status == 400
            assert "endpoint-load-metrics" not in response.headers
    if form == "json" and expected is not None:
        assert json.loads(expected.removeprefix("JSON "))["named_metrics"]["num_requests_waiting"] == 3.0


@pytest.mark.parametrize("names", [LLM_D, AIBRIX])
def test_a_gateway_finds_the_metrics_that_it_scrapes(names: tuple[str, ...]) -> None:
    metrics = EngineMetrics(cache_config={"block_size": "16", "num_gpu_blocks": "100"}, load=load_of(2))
    rows = RowCollector(lambda: with_vllm_names(metrics.collect_rows(), "m"))
    found = {sample.name: sample for sample in read_samples(exposition_text(rows.collect()).decode())}
    for name in names:
        assert f"vllm:{name}" in found
    assert found["vllm:cache_config_info"].labels.items() >= {"block_size": "16", "num_gpu_blocks": "100"}.items()
    assert found["vllm:num_requests_running"].value == 2.0
