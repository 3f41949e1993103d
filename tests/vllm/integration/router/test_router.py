"""The router over real vLLM servers with Baton's connector: the answers of one server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.doctor.checkup import Checkup
from baton.doctor.diagnose import check_up, findings_of
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, load_or_create_key
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.router import RouterConfig, build_app
from baton.text import Tokenizer
from baton.text.word_tokens import word_tokens
from baton.vllm.handoff_span import MARKS
from benchmarks.scrape import scrape
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, VllmServer, free_port, serve
from testkit.servers.collector import Collector, attributes
from testkit.servers.fake_serving import await_engines, served
from testkit.vllm.answers import NEAR_TIE
from testkit.vllm.servers import DETAILS, EAGLE3, LIMIT_S, MODEL, REQUEST_TIMEOUT, demo_prompts

pytestmark = pytest.mark.timeout(1800)

LENGTHS = [1, 2, 3, 17, 31, 32, 33, 47, 63, 64, 65, 96, 97, 127, 128, 129, 200, 333, 512, 1000]
NUM_TOKENS = 24


def baton(folder: Path, role: str, name: str) -> dict[str, Any]:
    extra = {"keys": str(folder / "keys"), "lease": 20.0}
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.vllm",
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def nixl(kind: str, role: str) -> dict[str, Any]:
    """Without NIXL's progress thread, which takes a core."""
    return {"kv_connector": kind, "kv_connector_module_path": "benchmarks.vllm.peers", "kv_role": role}


@contextlib.contextmanager
def serve_pair(
    folder: Path, kind: str, spec: Any, more: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Iterator[tuple[VllmServer, VllmServer]]:
    configs = []
    for name, role in (("P", "kv_producer"), ("D", "kv_consumer")):
        transfer = baton(folder, role, name) if kind == "BatonConnector" else nixl(kind, role)
        speculative = [] if spec is None else ["--speculative-config", json.dumps(spec)]
        flags = [*ONE_PROCESS, "--block-size", "32", *speculative, *more]
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **(variables or {})}
        configs.append(ServerConfig(name, flags, transfer, environment))
    make_keys(folder / "keys", ["P", "D"])
    with serve(sys.executable, str(MODEL), folder, configs) as (p, d):
        yield p, d


@contextlib.asynccontextmanager
async def routed(p: str, d: str, folder: Path, **config: Any) -> AsyncIterator[str]:
    make_keys(folder / "keys", [])
    key = load_or_create_key(ticket_key_file(folder / "keys"))
    ends = {"prefill": (p,), "decode": (d,), "ticket_life": MAX_TICKET_LIFE_S, "ticket_key": key}
    settings = RouterConfig(**{**ends, **config}, engine="vllm")
    async with served(await build_app(settings)) as url:
        yield url


async def complete(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], **body: Any) -> dict[str, Any]:
    asked = {"model": "demo", "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2}
    asked |= {"return_token_ids": True, **body}
    async with session.post(f"{url}/v1/completions", json=asked, timeout=REQUEST_TIMEOUT) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def streamed(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], **body: Any) -> list[int]:
    asked = {"model": "demo", "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    asked |= {"return_token_ids": True, **body}
    async with session.post(f"{url}/v1/completions", json=asked, timeout=REQUEST_TIMEOUT) as response:
        events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
    return [token for e in events for choice in e["choices"] for token in choice["token_ids"]]


async def alone(session: aiohttp.ClientSession, server: VllmServer, prompt: Sequence[int], **body: Any) -> Any:
    """One server's answer without its prefix cache."""
    more = {"cache_salt": "reference", "return_tokens_as_token_ids": True, **body}
    return await complete(session, server.url, prompt, **more)


def parts_at(found: Sequence[int], expected: dict[str, Any]) -> int | None:
    """Where tokens diverge from one server's; None if they do not, or at a near-tie of its own."""
    tops = [sorted(top.values(), reverse=True) for top in expected["logprobs"]["top_logprobs"]]
    for index, (have, want) in enumerate(zip(found, expected["token_ids"], strict=True)):
        if have != want:
            return None if tops[index][0] - tops[index][1] < NEAR_TIE else index
    return None


async def same_as_one_server(
    session: aiohttp.ClientSession, url: str, server: VllmServer, prompts: Sequence[Sequence[int]], **body: Any
) -> None:
    """Tokens, finish reason, usage and logprobs, with and without streaming."""
    for prompt in prompts:
        expected = await alone(session, server, prompt, **body)
        found = await complete(session, url, prompt, **body)
        want, have = expected["choices"][0], found["choices"][0]
        where = f"prompt of {len(prompt)} tokens"
        assert parts_at(have["token_ids"], want) is None, (where, have["token_ids"], want["token_ids"])
        assert have["finish_reason"] == want["finish_reason"], where
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert found["usage"][name] == expected["usage"][name], (where, name)
        have_p, want_p = have["logprobs"]["token_logprobs"], want["logprobs"]["token_logprobs"]
        assert len(have_p) == len(want_p)
        assert abs(have_p[0] - want_p[0]) < 1e-3, where
        assert parts_at(await streamed(session, url, prompt, **body), want) is None, where


async def usage(session: aiohttp.ClientSession, server: VllmServer) -> float:
    return max(await scrape(session, server.url, "vllm:kv_cache_usage_perc"))


async def until_free(session: aiohttp.ClientSession, servers: Sequence[VllmServer]) -> None:
    """Wait until no server holds a block, which must be long before a ticket expires."""
    until = time.monotonic() + LIMIT_S
    while any([await usage(session, server) for server in servers]):
        assert time.monotonic() < until, "blocks are held"
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def collector_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pair(folder: Path, collector_port: int) -> Iterator[tuple[VllmServer, VllmServer]]:
    """They tell what they can of requests, and trace those whose client does."""
    endpoint = f"http://127.0.0.1:{collector_port}/v1/traces"
    telling = ["--otlp-traces-endpoint", endpoint, "--enable-per-request-metrics", *DETAILS]
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with serve_pair(folder, "BatonConnector", EAGLE3, telling, variables) as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("seed", [False, True], ids=["both at once", "seeded"])
def test_answers_are_those_of_one_server(
    pair: tuple[VllmServer, VllmServer], folder: Path, seed: bool, mode: str
) -> None:
    async def run() -> None:
        p, d = pair
        async with aiohttp.ClientSession() as session:
            async with routed(p.url, d.url, folder, seed_first_token=seed, kv_mode=mode) as url:
                prompts = demo_prompts(LENGTHS, seed=100 + 10 * seed + (mode == "pull"))
                await same_as_one_server(session, url, d, prompts)
                async with session.get(f"{url}/status") as response:
                    state = await response.json()
                ends = state["handoffs"]
                assert (state["near_ties"], ends["failed"], ends["aborted"]) == (0, 0, 0)
                assert ends["completed"] + ends["finished_early"] == ends["started"]
            await until_free(session, pair)

    asyncio.run(run())


@pytest.mark.skipif(not DETAILS, reason="vLLM tells verifications of requests from 0.32 on")
def test_one_trace_has_the_spans_of_the_router_and_of_both_servers(
    pair: tuple[VllmServer, VllmServer], folder: Path, collector_port: int
) -> None:
    p, d = pair
    trace, collector = secrets.token_hex(16), Collector()

    async def run() -> Any:
        headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
        async with collector.run(collector_port) as endpoint, aiohttp.ClientSession(headers=headers) as session:
            async with routed(p.url, d.url, folder, otlp_traces_endpoint=endpoint) as url:
                (prompt,) = demo_prompts([333], seed=300)
                await complete(session, url, prompt, ignore_eos=True)
                async with session.get(f"{url}/status") as response:
                    state = await response.json()
            names: list[str] = []
            until = time.monotonic() + LIMIT_S
            while names.count("llm_request") < 3 or "baton.handoff_transfer" not in names:
                assert time.monotonic() < until, names
                await asyncio.sleep(0.1)
                names = [span.name for span in collector.spans]
        return state["acceptance"]["groups"]

    (group,) = asyncio.run(run())
    assert {span.trace_id.hex() for span in collector.spans} == {trace}
    spans = {span.name: span for span in collector.spans if span.name != "llm_request"}
    legs = {spans[f"baton.{role}_leg"].span_id for role in ("prefill", "decode")}
    parents = {span.parent_span_id for span in collector.spans if span.name == "llm_request"}
    assert legs < parents, "vLLM's own spans are children of the router's legs"
    assert {"baton.queue", "baton.prefill", "baton.handoff", "baton.first_verification", "baton.decode"} <= set(spans)
    moved = spans["baton.handoff_transfer"]
    assert moved.parent_span_id == spans["baton.decode_leg"].span_id
    # It registered at once, without waiting for P's admission.
    assert [event.name for event in moved.events] == [name for name in MARKS if name != "admitted"]
    times = [event.time_unix_nano for event in moved.events]
    assert times == sorted(times)
    assert attributes(moved)["baton.handoff.bytes"] > 0
    # The first step verifies the first token, and yields the second one; each later verification yields one more than
    # it accepts.
    first, later = group["first_verification"], group["later_verifications"]
    rounds = first["num_verifications"] + later["num_verifications"]
    accepted = EAGLE3["num_speculative_tokens"] * (
        first["acceptance"] + later["acceptance"] * later["num_verifications"]
    )
    assert NUM_TOKENS - 2 <= rounds + accepted <= NUM_TOKENS + 2
    asyncio.run(freed(pair))


def test_a_seeded_drafter_goes_on_as_one_that_saw_it_all(pair: tuple[VllmServer, VllmServer], folder: Path) -> None:
    """The drafter's KV of the prompt's last token depends on the first token: it is handed over as well."""
    positions = "vllm:spec_decode_num_accepted_tokens_per_pos"

    async def accepted(session: aiohttp.ClientSession, server: VllmServer) -> list[float]:
        return await scrape(session, server.url, positions)

    async def run() -> None:
        p, d = pair
        prompts = demo_prompts(LENGTHS, seed=200)
        async with aiohttp.ClientSession() as session, routed(p.url, d.url, folder, seed_first_token=True) as url:
            counts = [await accepted(session, d)]
            tokens = [(await complete(session, url, prompt))["choices"][0]["token_ids"] for prompt in prompts]
            counts.append(await accepted(session, d))
            for prompt, found in zip(prompts, tokens, strict=True):
                if len(found) > 1:
                    more = await alone(session, d, [*prompt, found[0]], max_tokens=NUM_TOKENS - 1)
                    assert parts_at(found[1:], more["choices"][0]) is None
            counts.append(await accepted(session, d))
        seeded, single = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(counts))
        assert seeded == single
        assert sum(single) > len(prompts)

    asyncio.run(run())


def test_answers_end_at_limits_and_stop_tokens(pair: tuple[VllmServer, VllmServer], folder: Path) -> None:
    async def run() -> None:
        p, d = pair
        (prompt,) = demo_prompts([150], seed=5)
        async with aiohttp.ClientSession() as session:
            for seed in (False, True):
                async with routed(p.url, d.url, folder, seed_first_token=seed) as url:
                    tokens = (await alone(session, d, prompt))["choices"][0]["token_ids"]
                    for body in ({"max_tokens": 1}, {"max_tokens": 2}, {"stop_token_ids": tokens[:1]}):
                        want = (await alone(session, d, prompt, **body))["choices"][0]
                        have = (await complete(session, url, prompt, **body))["choices"][0]
                        for name in ("token_ids", "finish_reason", "stop_reason"):
                            assert have[name] == want[name], (seed, body, name)
                    # If the first token ends a request, D fetches nothing: the prefill server is told to free its
                    # blocks.
                    await until_free(session, pair)

    asyncio.run(run())


def test_what_vllm_refuses_after_status_200_is_the_clients_error(
    pair: tuple[VllmServer, VllmServer], folder: Path
) -> None:
    async def run() -> None:
        p, d = pair
        async with aiohttp.ClientSession() as session, routed(p.url, d.url, folder) as url:
            for server in (d.url, url):
                body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 2, "logit_bias": {"5": 1}}
                async with session.post(f"{server}/v1/completions", json=body, timeout=REQUEST_TIMEOUT) as response:
                    assert response.status == 400
                    assert "not yet supported with speculative decoding" in await response.text()
            await until_free(session, pair)

    asyncio.run(run())


def test_bad_words_are_barred_on_both_legs(pair: tuple[VllmServer, VllmServer], folder: Path) -> None:
    """Words at the beginning of an answer and later ones: the first token is the prefill server's."""
    tokenizer = Tokenizer.load(MODEL)

    async def run() -> None:
        p, d = pair
        async with aiohttp.ClientSession() as session, routed(p.url, d.url, folder) as url:
            num_barred = 0
            for prompt in demo_prompts([5, 64, 200], seed=7):
                free = (await alone(session, d, prompt))["choices"][0]["token_ids"]
                texts = [tokenizer.decode(free[i : i + n]).strip() for i, n in ((0, 1), (0, 2), (6, 2), (11, 1))]
                words = tuple(text for text in texts if text)
                spelt = word_tokens(words, tokenizer, tokenizer.vocab_size)
                num_barred += any(holds(free, word) for word in spelt)
                await same_as_one_server(session, url, d, [prompt], bad_words=list(words), ignore_eos=True)
                found = await complete(session, url, prompt, bad_words=list(words), ignore_eos=True)
                tokens = found["choices"][0]["token_ids"]
                assert not any(holds(tokens, word) for word in spelt)
            assert num_barred > 1, "words were barred that no answer held"

    asyncio.run(run())


def holds(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == tuple(word) for i in range(len(tokens)))


async def diagnosed(pair: Sequence[VllmServer], folder: Path, keys: str = "keys", **config: Any) -> Checkup:
    """A check-up of two servers and a router over the first as prefill and the second as decode server."""
    p, d = pair
    async with routed(p.url, d.url, folder, **config) as url, aiohttp.ClientSession() as session:
        await await_engines(session, url)
        return await check_up([p.url, d.url], url, str(folder / keys), timeout_s=LIMIT_S, clock_s=0.0)


def test_the_doctor_finds_a_healthy_pair_ready(pair: tuple[VllmServer, VllmServer], folder: Path) -> None:
    checkup = asyncio.run(diagnosed(pair, folder))
    assert [str(finding) for finding in findings_of(checkup)] == []
    assert checkup.trial is not None
    assert checkup.trial.handoffs == {"started": 1, "completed": 1}
    assert checkup.trial.num_bytes


@pytest.mark.parametrize(
    ("name", "words", "wrong"),
    [
        ("handoff_failed", "ticket key", {"ticket_key": b"another one of 32 bytes or more.."}),
        ("keys", "has no key", {"keys": "others"}),
    ],
)
def test_the_doctor_finds_what_is_wrong(
    pair: tuple[VllmServer, VllmServer], folder: Path, name: str, words: str, wrong: dict[str, Any]
) -> None:
    make_keys(folder / "others", ["X"])
    checkup = asyncio.run(diagnosed(pair, folder, **wrong))
    found = [str(finding) for finding in findings_of(checkup) if finding.name == name]
    assert any(words in text for text in found), findings_of(checkup)
    asyncio.run(freed(pair))


async def freed(servers: Sequence[VllmServer]) -> None:
    async with aiohttp.ClientSession() as session:
        await until_free(session, servers)


def test_a_decode_server_that_never_saw_its_leg(pair: tuple[VllmServer, VllmServer], folder: Path) -> None:
    """The prefill server frees its blocks at once, not only when the ticket expires."""

    async def run() -> None:
        p, d = pair
        (prompt,) = demo_prompts([700], seed=6)
        async with aiohttp.ClientSession() as session, TestServer(impostor(session, d)) as deaf:
            address = str(deaf.make_url("")).rstrip("/")
            for seed in (False, True):
                async with routed(p.url, address, folder, seed_first_token=seed, recovery="none") as url:
                    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                    async with session.post(f"{url}/v1/completions", json=body) as response:
                        assert response.status == 503
                    await until_free(session, [p])

    asyncio.run(run())


def impostor(session: aiohttp.ClientSession, server: VllmServer) -> web.Application:
    """Claims to be `server`, and takes no legs."""

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if b'"decode"' in body:
            await asyncio.sleep(0.3)
            return web.json_response({"error": {"message": "not today"}}, status=500)
        async with session.request(request.method, server.url + request.path, data=body, headers=request.headers) as r:
            return web.Response(body=await r.read(), status=r.status, content_type=r.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    return app
