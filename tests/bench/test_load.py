"""`baton bench serve`: when requests are sent, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from typer.testing import CliRunner

from baton.bench.load import Load, run_load, spec_decode_counters
from baton.bench.load_figures import (
    RequestOutcome,
    load_figures,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    spec_decode_figures,
)
from baton.bench.load_requests import LoadRequest, PrefixRepetition, RandomPrompts, arrival_times
from baton.cli.bench import app as bench_app
from baton.errors import ConfigError, EngineUnavailableError
from baton.openai.client import connected_client
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served, write_tokenizer

VOCABULARY = range(100, 200)
# The keys that `vllm bench serve --save-result --save-detailed` of vLLM 0.32 writes, without `rtfx`, which is for
# audio.
VLLM_KEYS = (
    "backend burstiness completed date duration endpoint_type errors failed generated_texts input_lens itls label "
    "latencies max_concurrency max_concurrent_requests max_output_tokens_per_s mean_itl_ms mean_tpot_ms "
    "mean_ttft_ms median_itl_ms median_tpot_ms median_ttft_ms model_id num_prompts output_lens output_throughput "
    "p99_itl_ms p99_tpot_ms p99_ttft_ms queue_times request_goodput request_rate request_throughput start_times "
    "std_itl_ms std_tpot_ms std_ttft_ms tokenizer_id total_input_tokens total_output_tokens "
    "total_token_throughput ttfts "
)
DETAILS = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_requests_come_at_their_rate(burstiness: float) -> None:
    times = arrival_times(2000, 8.0, burstiness, rng())
    assert times == sorted(times)
    assert times[-1] == pytest.approx(250.0)
    gaps = np.diff([0.0, *times])
    # The coefficient of variation of a gamma distribution of shape b is 1 / sqrt(b).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1, abs=1e-6)
    assert times == arrival_times(2000, 8.0, burstiness, rng())


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, rng()) == [0.0, 0.0, 0.0]


def test_bursts_without_any_gap_are_refused() -> None:
    with pytest.raises(ConfigError, match="burstiness"):
        arrival_times(2, 1.0, 1e-300, rng())


def test_random_prompts_share_their_prefix_alone() -> None:
    made = RandomPrompts(input_len=40, output_len=10, range_ratio=0.5, prefix_len=16).make(200, VOCABULARY, rng())
    assert len({request.prompt[:16] for request in made}) == 1
    assert len({request.prompt[16:28] for request in made}) == 200
    assert {len(request.prompt) - 16 for request in made} <= set(range(20, 61))
    assert {request.max_tokens for request in made} == set(range(5, 16))
    assert {token for request in made for token in request.prompt} == set(VOCABULARY)
    exact = RandomPrompts(7, 3).make(5, VOCABULARY, rng())
    assert [(len(r.prompt), r.max_tokens) for r in exact] == [(7, 3)] * 5


def test_prefixes_are_repeated_evenly() -> None:
    made = PrefixRepetition(prefix_len=8, suffix_len=8, num_prefixes=3, output_len=2).make(10, VOCABULARY, rng())
    prefixes = [request.prompt[:8] for request in made]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3, 4]
    assert len({request.prompt[8:] for request in made}) == 10


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (RandomPrompts(input_len=0), "random_input_len"),
        (RandomPrompts(output_len=0), "random_output_len"),
        (RandomPrompts(prefix_len=-1), "random_prefix_len"),
        (RandomPrompts(range_ratio=1.0), "random_range_ratio"),
        (RandomPrompts(range_ratio=math.nan), "random_range_ratio"),
        (PrefixRepetition(num_prefixes=0), "prefix_repetition_num_prefixes"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompts: RandomPrompts | PrefixRepetition, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}:"):
        prompts.check()


def two_and_a_failure() -> list[RequestOutcome]:
    return [
        RequestOutcome(100, 10.0, 0.0, ttft=0.2, itl=[0.5, 0.1, 0.1, 0.1], latency=1.0, output_len=9, text="a"),
        RequestOutcome(50, 11.5, 0.25, ttft=0.4, latency=0.4, output_len=1, text="b"),
        RequestOutcome(70, 10.0, error="out of luck"),
    ]


def test_figures_of_a_load() -> None:
    names = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "handoff", "handoff_overhead")
    figures = load_figures(two_and_a_failure(), 2.0, names, (50.0, 99.5), {"ttft": 300.0, "tpot": 100.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (150, 10)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.0, 5.0)
    assert figures["total_token_throughput"] == 80.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(300.0)
    assert figures["std_ttft_ms"] == pytest.approx(100.0)
    assert figures["p99.5_ttft_ms"] == pytest.approx(399.0)
    assert figures["median_tpot_ms"] == figures["p50_tpot_ms"] == pytest.approx(100.0)
    assert figures["mean_itl_ms"] == pytest.approx(200.0)
    assert figures["mean_e2el_ms"] == pytest.approx(700.0)
    assert figures["mean_client_queue_time_ms"] == pytest.approx(125.0)
    assert figures["mean_handoff_ms"] == pytest.approx(500.0)
    assert figures["mean_handoff_overhead_ms"] == pytest.approx(400.0)
    # The first second has four events of the first request; its last one and the other request's come in the next.
    assert (figures["max_output_tokens_per_s"], figures["max_concurrent_requests"]) == (4.0, 2)
    assert figures["errors"] == ["", "", "out of luck"]


def test_figures_without_measurements_are_none() -> None:
    figures = load_figures(two_and_a_failure()[1:], 1.0, ("tpot", "itl"), (99.0,), {})
    assert figures["mean_tpot_ms"] is None
    assert figures["p99_itl_ms"] is None
    assert figures["request_goodput"] is None
    nothing = load_figures([RequestOutcome(1, error="no")], 1.0, ("ttft",), (99.0,), {"ttft": 1.0})
    assert (nothing["median_ttft_ms"], nothing["request_goodput"]) == (None, 0.0)


def test_acceptance_is_of_the_time_between() -> None:
    before = {"drafts": 10.0, "draft_tokens": 30.0, "accepted": 5.0, "0": 5.0}
    after = {"drafts": 14.0, "draft_tokens": 42.0, "accepted": 11.0, "0": 8.0, "1": 2.0, "10": 1.0}
    figures = spec_decode_figures(before, after)
    assert figures["spec_decode_acceptance_rate"] == 50.0
    assert figures["spec_decode_acceptance_length"] == 2.5
    assert figures["spec_decode_per_position_acceptance_rates"] == [0.75, 0.5, 0.25]
    assert spec_decode_figures(after, after) == {}


@pytest.mark.parametrize("text", ["itl:3", "ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "ttft:1 ttft:2"])
def test_goodput_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^goodput:"):
        parse_goodput(text)


def test_lists_in_flags_are_parsed_or_refused_by_name() -> None:
    assert parse_goodput("ttft:200 tpot:20,e2el:1.5") == {"ttft": 200.0, "tpot": 20.0, "e2el": 1.5}
    assert parse_goodput(None) == {}
    assert parse_metrics("ttft,e2el") == ("ttft", "e2el")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    with pytest.raises(ConfigError, match="percentile_metrics"):
        parse_metrics("ttft,speed")


@pytest.mark.parametrize("text", ["101", "x", "-1"])
def test_a_percentile_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="metric_percentiles"):
        parse_percentiles(text)


async def test_a_load_is_sent_and_counted(directory: Path) -> None:
    engine = FakeEngine(directory, step_s=0.002)
    requests = [LoadRequest((1, 2, 3), 8), LoadRequest((4,), 1), LoadRequest((5,) * 1000, 4), LoadRequest((6, 7), 5)]
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        run = await run_load(url, Load(requests, [0.0, 0.0, 0.05, 0.1], extra={"ignore_eos": True}), num_warmups=2)
    first, single, long, last = run.outcomes
    assert [(o.prompt_len, o.output_len) for o in (first, single, last)] == [(3, 8), (1, 1), (2, 5)]
    # The third is longer than the engine accepts.
    assert "HTTP 400" in long.error
    assert not any(o.error for o in (first, single, last))
    assert 0.0 < first.ttft < first.latency
    assert first.latency == pytest.approx(first.ttft + sum(first.itl))
    assert last.start_time - first.start_time >= 0.09
    assert run.duration_s >= 0.1 + last.latency
    assert run.before is not None


async def test_requests_wait_for_their_turn_and_the_wait_is_told() -> None:
    running = most = awaited = 0
    reached = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most >= awaited:
            reached.set()
        await asyncio.wait_for(reached.wait(), 60)
        response = web.StreamResponse()
        await response.prepare(request)
        for text in ("a", "b"):
            await asyncio.sleep(0.03)
            await response.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode())
        running -= 1
        usage = b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}'
        await response.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")
        return response

    server = web.Application()
    server.router.add_post("/v1/completions", complete)
    async with served(server) as url:
        run = await run_load(url, Load([LoadRequest((1,), 2)] * 6, [0.0] * 6, max_concurrency=2), "any")
        assert most == 2
        waits = [o.queue_time for o in run.outcomes]
        assert waits == sorted(waits)
        assert waits[2] >= 0.06  # an answer has two pauses
        assert waits[4] >= waits[2] + 0.03
        # A request's own latency does not include the wait, which is reported separately.
        assert run.outcomes[5].latency + waits[5] < run.duration_s + 0.02
        most, awaited = 0, 101
        reached.clear()
        await run_load(url, Load([LoadRequest((1,), 2)] * 130, [0.0] * 130), "any")
        assert most > 100
    assert (run.before, run.after) == (None, None)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([b'{"choices": [{"text": "a"}]}', b"[DONE]"], "usage"),
        ([b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}', b"[DONE]"], "no tokens"),
        ([b'{"choices": [{"text": "a"}]}'], "mid-stream"),
        ([b'{"choices": 1}', b"[DONE]"], "malformed"),
    ],
)
async def test_answers_that_cannot_be_counted_have_failed(events: list[bytes], error: str) -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=b"".join(b"data: " + event + b"\n\n" for event in events))

    server = web.Application()
    server.router.add_post("/v1/completions", complete)
    async with served(server) as url:
        load = Load([LoadRequest((1,), 2)], [0.0])
        (outcome,) = (await run_load(url, load, "any")).outcomes
        assert error in outcome.error
        with pytest.raises(EngineUnavailableError, match="warm up"):
            await run_load(url, load, "any", num_warmups=1)


@pytest.mark.parametrize("line", [b'data: {"choices": [{"text": "a"}]}\n\n', b": still here\n\n"])
async def test_an_answer_without_an_end_has_failed(line: bytes) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(line)
                await asyncio.sleep(0.001)
        return response

    server = web.Application()
    server.router.add_post("/v1/completions", complete)
    async with served(server) as url:
        load = Load([LoadRequest((1,), 2)], [0.0], request_timeout_s=0.05)
        (outcome,) = (await run_load(url, load, "any")).outcomes
    assert "no answer in time" in outcome.error


async def test_metrics_that_do_not_come_are_none() -> None:
    gone = asyncio.Event()

    async def metrics(request: web.Request) -> web.Response:
        await gone.wait()
        return web.Response(body=b"")

    server = web.Application()
    server.router.add_get("/metrics", metrics)
    async with served(server) as url, connected_client(url) as client:
        assert await spec_decode_counters(client, timeout_s=0.01) is None
        gone.set()
        assert await spec_decode_counters(client) == {}


async def test_the_command_writes_vllms_keys(directory: Path, tmp_path: Path) -> None:
    arguments = ["serve", "--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "6", "--json"]
    arguments += [
        "--tokenizer",
        str(directory),
        "--goodput",
        "ttft:60000",
        "--result-dir",
        str(tmp_path),
        "--save-result",
    ]
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        arguments += ["--base-url", url, "--ignore-eos"]
        detailed = [*arguments, "--save-detailed", "--result-filename", "all.json"]
        shown = await asyncio.to_thread(CliRunner().invoke, bench_app, detailed)
        assert shown.exit_code == 0, shown.output
        short = [*arguments, "--result-filename", "short.json"]
        assert (await asyncio.to_thread(CliRunner().invoke, bench_app, short)).exit_code == 0
        many = await asyncio.to_thread(CliRunner().invoke, bench_app, [*arguments, "--random-input-len", "9000"])
    written = json.loads((tmp_path / "all.json").read_text())
    assert sorted(name for name in written if not name.startswith("spec_decode_")) == sorted(VLLM_KEYS.split())
    assert (written["completed"], written["input_lens"], written["output_lens"]) == (4, [5] * 4, [6] * 4)
    assert written["request_rate"] == "inf"
    assert set(written) - set(json.loads((tmp_path / "short.json").read_text())) == DETAILS
    assert json.loads(shown.stdout)["total_output_tokens"] == 24
    # Without any answer there are no figures.
    assert isinstance(many.exception, EngineUnavailableError)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--request-rate", "0"], "request_rate"),
        (["--burstiness", "nan"], "burstiness"),
        (["--request-timeout-s", "0"], "request_timeout_s"),
        (["--request-timeout-s", "inf"], "request_timeout_s"),
        (["--request-timeout-s", "9", "--tool", "vllm"], "request_timeout_s"),
        (["--save-detailed"], "save_result"),
        (["--goodput", "itl:3"], "goodput"),
        (["--random-range-ratio", "2"], "random_range_ratio"),
        (["--base-url", "ftp://x"], "base_url"),
    ],
)
def test_settings_that_cannot_be_are_named(flags: list[str], field: str) -> None:
    result = CliRunner().invoke(bench_app, ["serve", *flags])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == field
