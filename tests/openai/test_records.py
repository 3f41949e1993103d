"""What an operator sees of requests: a line each, throughput, and metrics in vLLM's names."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.cli.logs import log_to_stderr
from baton.openai import FrontMetrics
from baton.openai.records import SequenceRecord, report_throughput
from baton.server import build_app
from baton.text import Tokenizer
from tests.server.fake_serving import FakeEngine, complete, served


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


async def test_a_line_for_each_request(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai.records")
    engine = FakeEngine(directory, step_s=0.01)
    async with served(build_app(engine, Tokenizer.load(directory))) as url, aiohttp.ClientSession() as session:
        _, answer = await complete(session, url, prompt="abc", max_tokens=7)
        (line,) = fields(caplog)
        assert line["id"].startswith(answer["id"])
        assert (line["ttft_ms"], line["tpot_ms"]) == (pytest.approx(5, abs=500), pytest.approx(5, abs=500))
        counts = {name: line[name] for name in ("model", "prompt_tokens", "output_tokens", "cached_tokens", "finish")}
        assert counts == {
            "model": "fake",
            "prompt_tokens": 3,
            "output_tokens": 7,
            "cached_tokens": 1,
            "finish": "length",
        }
        assert line["where"] == "one_engine"
        # A client that leaves, and an engine that fails.
        body = {"prompt": "a", "max_tokens": 200, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readline()
        while len(fields(caplog)) < 2:
            await asyncio.sleep(0.01)
        engine.fail = "mid-stream"
        assert (await complete(session, url, max_tokens=20))[0] == 500
        assert [line["finish"] for line in fields(caplog)] == ["length", "abort", "error"]
        async with session.get(f"{url}/metrics") as answered:
            text = await answered.text()
    for reason in ("length", "abort", "error"):
        assert f'vllm:request_success_total{{finished_reason="{reason}",model_name="fake"}} 1.0' in text
    assert 'vllm:prompt_tokens_total{model_name="fake"} 5.0' in text
    assert 'vllm:request_generation_tokens_count{model_name="fake"} 3.0' in text
    assert 'vllm:e2e_request_latency_seconds_count{model_name="fake"} 3.0' in text
    assert 'vllm:request_max_num_generation_tokens_sum{model_name="fake"} ' in text
    assert "_created" not in text


async def test_throughput_is_told_while_there_is_any(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai.records")
    metrics = FrontMetrics()
    task = asyncio.create_task(report_throughput(metrics, lambda: ", waiting 2", every_s=0.02))
    await asyncio.sleep(0.1)
    assert not caplog.records, "nothing runs"
    record = SequenceRecord(metrics, "x", "m", 50)
    record.tokens(3)
    while not caplog.records:
        await asyncio.sleep(0.01)
    assert "output 0.0" not in caplog.messages[0]
    assert caplog.messages[0].endswith("running 1, waiting 2")
    record.end("stop", log=False)
    await asyncio.sleep(0.05)
    num = len(caplog.records)
    await asyncio.sleep(0.1)
    assert len(caplog.records) == num
    task.cancel()


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_a_log(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before = root.handlers[:], root.level, baton.level
    try:
        log_to_stderr("info", form)
        logging.getLogger("baton.openai.records").info("a\tb", extra={"fields": {"id": "7"}})
        logging.getLogger("baton.openai.records").debug("too much")
        logging.getLogger("aiohttp").info("too much")
    finally:
        root.handlers[:], root.level, baton.level = before
    (line,) = capsys.readouterr().err.splitlines()
    if form == "text":
        assert line.endswith("Z INFO baton.openai.records: a\tb")
        return
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {"level": "info", "logger": "baton.openai.records", "message": "a\tb", "id": "7"}
