"""Request records for operators: a line per request, throughput, and metrics with vLLM's names."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.cli.logs import log_to_stderr
from baton.log_limit import LINES_PER_SECOND
from baton.openai import FrontMetrics
from baton.openai.http.access import Access
from baton.openai.http.app import DRAIN
from baton.openai.records import SequenceRecord, report_throughput
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, complete, served


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "baton.openai.records"]


async def test_a_line_for_each_request(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai.records")
    engine = FakeEngine(directory, step_s=0.01)
    async with served(build_app(engine, Tokenizer.load(directory))) as url, aiohttp.ClientSession() as session:
        began = time.perf_counter()
        _, answer = await complete(session, url, prompt="abc", max_tokens=7)
        took_ms = (time.perf_counter() - began) * 1e3
        (line,) = fields(caplog)
        assert line["id"].startswith(answer["id"])
        assert 0 < line["ttft_ms"] < took_ms
        assert 1 < line["tpot_ms"] < took_ms
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
        assert [line["error"] for line in fields(caplog)] == [None, None, "a bug"]
        async with session.get(f"{url}/metrics") as answered:
            text = await answered.text()
    assert [
        reason
        for reason in ("length", "abort", "error")
        if f'vllm:request_success_total{{finished_reason="{reason}",model_name="fake"}} 1.0' not in text
    ] == []
    assert 'vllm:prompt_tokens_total{model_name="fake"} 5.0' in text
    assert 'vllm:request_generation_tokens_count{model_name="fake"} 3.0' in text
    assert 'vllm:e2e_request_latency_seconds_count{model_name="fake"} 3.0' in text
    assert 'vllm:request_max_num_generation_tokens_sum{model_name="fake"} ' in text
    assert "_created" not in text


async def test_a_line_says_whose_request_it_was(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai")
    access = Access(("first key", "second key"))
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), access=access)
    long = "a" * 5000  # planned on a worker thread
    users = [("alice", "alice"), ('b="c"\nd', 'b="c"\nd'), (None, None), (7, None), ("x" * 400, None)]
    async with served(app) as url, aiohttp.ClientSession() as session:
        for user, told in users:
            for prompt in ("a", long):
                headers = {"Authorization": "Bearer second key", "X-Request-Id": "mine-1"}
                body = {"prompt": prompt, "max_tokens": 1, "user": user}
                async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                    assert response.headers["X-Request-Id"] == "mine-1"
                    assert response.status == (200 if prompt == "a" else 400), "it is too long here"
            line = fields(caplog)[-1]
            whose = {name: line[name] for name in ("request_id", "address", "key", "user")}
            assert whose == {"request_id": "mine-1", "address": "127.0.0.1", "key": 2, "user": told}
        (refused,) = {(r.fields["user"], r.fields["param"]) for r in refusals(caplog) if r.fields["user"] == "alice"}
        assert refused == ("alice", "prompt")
    assert any(r'user="b=\"c\"\nd"' in message for message in caplog.messages), "on one line"
    assert not any("key=second" in message or "second key" in message for message in caplog.messages)


def refusals(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == "baton.openai.http"]


async def test_a_line_for_each_refused_request(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai")
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), access=Access(("a key",)))
    good = {"Authorization": "Bearer a key"}
    async with served(app) as url, aiohttp.ClientSession() as session:
        for path, body, headers in (
            ("/v1/completions", {"prompt": "a", "temperature": -1}, good),
            ("/v1/completions", {"prompt": "a"}, {}),
            ("/v1/completions", {"prompt": "a", "model": "other"}, good),
            ("/v1/nothing\x1b[2J", {}, good),
            ("/v1/models", {}, good),
        ):
            async with session.post(url + path, json=body, headers={**headers, "X-Request-Id": "r-7"}) as response:
                assert response.status >= 400
        async with session.options(f"{url}/v1/models") as response:
            assert response.headers["X-Request-Id"] != "r-7", "a connection's next request has an id of its own"
    told = [(r.fields["status"], r.fields["endpoint"], r.fields["param"]) for r in refusals(caplog)][:5]
    assert told == [
        (400, "/v1/completions", "temperature"),
        (401, "/v1/completions", None),
        (404, "/v1/completions", "model"),
        (404, "/v1/nothing\x1b[2J", None),
        (405, "/v1/models", None),
    ]
    assert all(r.fields["request_id"] == "r-7" and r.fields["address"] for r in refusals(caplog)[:5])
    assert "refused status=400 method=POST endpoint=/v1/completions param=temperature" in caplog.text
    assert all(message.isprintable() for message in caplog.messages)


async def test_a_flood_of_refusals_does_not_fill_the_log(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai")
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:
        for _ in range(300):
            async with session.get(f"{url}/nowhere") as response:
                assert response.status == 404
        seconds = {int(record.created) for record in refusals(caplog)}
        assert len(refusals(caplog)) <= LINES_PER_SECOND * len(seconds)
        async with session.get(f"{url}/metrics") as answered:
            assert 'baton:http_requests_total{endpoint="unknown",status="404"} 300.0' in await answered.text()


async def test_metrics_of_the_process_and_of_its_end(directory: Path) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:

        async def metrics() -> str:
            async with session.get(f"{url}/metrics") as answered:
                return await answered.text()

        for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "start_time_seconds"):
            assert f"process_{name} " in await metrics()
        assert "baton:draining 0.0" in await metrics()
        app[DRAIN].begin()
        assert "baton:draining 1.0" in await metrics()


async def several_turns() -> None:
    """Of the event loop; a task that sleeps for no time reports in each."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_throughput_is_told_while_there_is_any(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai.records")
    metrics = FrontMetrics()
    task = asyncio.create_task(report_throughput(metrics, lambda: ", waiting 2", every_s=0.0))
    await several_turns()
    assert not caplog.records, "nothing runs"
    record = SequenceRecord(metrics, "x", "m", 50)
    record.tokens(3)
    await several_turns()
    assert "output 0.0" not in caplog.messages[0]
    assert caplog.messages[0].endswith("running 1, waiting 2")
    record.end("stop", log=False)
    await several_turns()  # the last period in which something ran
    num = len(caplog.records)
    await several_turns()
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
