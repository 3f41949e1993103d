"""The client of one vLLM server, against a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from baton.comparison import facts_of, token_identity
from baton.errors import (
    EngineLostError,
    EngineUnavailableError,
    HandoffError,
    IncompatiblePeerError,
    ProtocolError,
    RequestError,
)
from baton.openai.answers import Choice, Logprobs
from baton.router.clients import vllm_client
from baton.router.clients.address import checked_url, split_rank
from baton.router.clients.engine_client import BatonClient, new_session
from baton.router.clients.vllm_api import completion_body, to_chunk
from baton.router.clients.vllm_client import VllmClient
from baton.router.connectors import create_connector
from baton.router.connectors.base import Connector, ConnectorConfig
from baton.router.timers import RouterTimers
from baton.sampling_params import NO_DEFAULTS, SamplingDefaults, SamplingParams, StructuredOutputsParams, seed_word
from baton.wire import GenerateRequest, LegTimings, Role, TokenChunk, TokenLogprobs
from testkit.servers.fake_vllm import FakeVllm, token_at

PROMPT = [10, 11, 12, 13]


@pytest.fixture
def server(tmp_path: Path) -> FakeVllm:
    return FakeVllm(tmp_path)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session() as opened:
        yield opened


@pytest.fixture
async def url(server: FakeVllm) -> AsyncIterator[str]:
    async with server.serve() as running:
        yield running


def connector(kind: str = "BatonConnector") -> Connector:
    return create_connector(kind, ConnectorConfig(b"k" * 32))


def client(
    session: aiohttp.ClientSession, url: str, role: Role = "prefill", kind: str = "BatonConnector"
) -> VllmClient:
    made = connector(kind).client(session, url, RouterTimers(), role)
    assert isinstance(made, VllmClient)
    return made


def ask(known: int = 0, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT) - known if known else None,
        sampling_params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),
    )


def body(request: GenerateRequest, first_only: bool = False) -> dict[str, Any]:
    return completion_body(request, "demo", request.num_known, None, first_only, stream=True)


async def chunks(of: VllmClient, request: GenerateRequest, **how: Any) -> list[TokenChunk]:
    return [chunk async for chunk in of.leg(request, **how)]


async def test_a_data_parallel_rank_is_an_engine_of_its_own(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    """Each request names the rank, and each instance of a server with several must have one."""
    with pytest.raises(RequestError, match="has no such rank"):
        await client(session, f"{url}#dp_rank=1").info()
    server.has_ranks = True
    with pytest.raises(RequestError, match="name each, as URL#dp_rank=0"):
        await client(session, url).info()
    server.ranks.clear()
    engine = client(session, f"{url}#dp_rank=1")
    assert (await engine.info()).engine_id == "P_dp1"
    await chunks(engine, ask())
    assert server.ranks == ["1", "1"]
    assert (await engine.load()).num_waiting == 7
    assert (await client(session, f"{url}#dp_rank=0").info()).engine_id == "P_dp0"
    with pytest.raises(RequestError, match="without data-parallel ranks"):
        await client(session, f"{url}#dp_rank=0", kind="NixlConnector").info()
    with pytest.raises(RequestError, match="only vLLM and SGLang servers"):
        BatonClient(session, f"{url}#dp_rank=0", RouterTimers())


@pytest.mark.parametrize("bad", ["#dp_rank=-1", "#dp_rank=01", "#dp_rank=", "#rank=1", "#dp_rank=1&x"])
def test_a_url_may_name_a_data_parallel_rank(bad: str) -> None:
    assert checked_url("http://a:1/#dp_rank=12") == "http://a:1#dp_rank=12"
    assert split_rank("http://a:1#dp_rank=12") == ("http://a:1", 12)
    assert split_rank(checked_url("http://a:1/")) == ("http://a:1", None)
    with pytest.raises(RequestError, match="is not a base URL"):
        checked_url(f"http://a:1{bad}")


async def test_an_engines_identity_is_asked_once_per_incarnation(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    engine = client(session, url)
    info = await engine.info()
    assert (info.engine_id, info.role, info.model, info.max_model_len) == ("P", "prefill", "demo", 512)
    assert (info.model_path, info.incarnation) == (str(server.root), "P-1")
    await engine.info()
    assert len(server.asked) == 1
    assert server.asked[0]["kv_transfer_params"] == {"baton": {"role": "identify"}}
    server.healthy = False
    with pytest.raises(EngineUnavailableError):
        await engine.info()
    server.healthy, server.name = True, "Q"
    assert (await engine.info()).incarnation == "Q-1"


def restart(server: FakeVllm) -> None:
    """Another process with another model takes the place at once."""
    server.name, server.fingerprint = "Q", '{"model.weights": "b"}'
    server.started = None if server.started is None else server.started + 1.0


@pytest.mark.parametrize("started", [None, 1.7e9])
async def test_a_server_that_restarts_between_two_looks_is_asked_anew(
    server: FakeVllm, session: aiohttp.ClientSession, url: str, monkeypatch: pytest.MonkeyPatch, started: float | None
) -> None:
    server.started = started
    engine = client(session, url)
    planned = msgspec.structs.replace(ask(), identity=token_identity((await engine.info()).fingerprint))
    assert await chunks(engine, planned)
    assert len(server.legs("identify")) == 1
    # A leg is not sent to a server that was not checked for so long: it may be another one.
    monkeypatch.setattr(vllm_client, "_UNSEEN_S", 0.0)
    assert await chunks(engine, planned)
    assert await engine.info()
    assert len(server.legs("identify")) == (3 if started is None else 1)
    restart(server)
    num_legs = len(server.legs("none"))
    with pytest.raises(IncompatiblePeerError, match="identity"):
        await chunks(engine, planned)
    with pytest.raises(IncompatiblePeerError, match="identity"):
        await engine.first_token(planned, {})
    assert len(server.legs("none")) == num_legs
    assert (await engine.info()).incarnation == "Q-1"


@pytest.mark.parametrize(
    ("defaults", "expected", "fact"),
    [
        ({}, NO_DEFAULTS, ""),
        ({"temperature": 0.6, "top_k": 20}, SamplingDefaults(temperature=0.6, top_k=20), "temperature 0.6, top_k 20"),
        # vLLM resets the others where a request is greedy.
        (
            {"temperature": 0.0, "top_p": 0.9, "min_p": 0.1, "top_k": 5},
            SamplingDefaults(temperature=0.0, top_p=0.9, min_p=0.1, top_k=5),
            "temperature 0, top_p 0.9, top_k 5, min_p 0.1",
        ),
        (
            {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "max_tokens": 30},
            SamplingDefaults(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5, max_tokens=30),
            "presence_penalty 0.5, frequency_penalty -0.5, repetition_penalty 1.1, max_tokens 30",
        ),
        ({"max_tokens": 9, "limit": 9}, SamplingDefaults(max_tokens=9, limit=9), "max_tokens 9, limit 9"),
        ({"max_tokens": 4096}, NO_DEFAULTS, ""),  # more than the context
        (None, NO_DEFAULTS, "unknown"),
    ],
)
async def test_a_server_tells_its_sampling_defaults(
    server: FakeVllm,
    session: aiohttp.ClientSession,
    defaults: dict[str, Any] | None,
    expected: SamplingDefaults,
    fact: str,
) -> None:
    server.kind, server.defaults = "pull", defaults
    async with server.serve() as url:
        info = await client(session, url, kind="NixlConnector").info()
    assert info.sampling_defaults == expected
    assert facts_of(info.fingerprint)["output.sampling_defaults"] == fact


@pytest.mark.parametrize("body", [b"{}", b"[]", b"no", b'[{"prompt_token_ids": [0]}]', b'[{"sampling_params": 1}]'])
async def test_a_server_that_renders_otherwise_tells_no_defaults(
    server: FakeVllm, session: aiohttp.ClientSession, url: str, body: bytes
) -> None:
    server.kind, server.raw["/v1/completions/render"] = "pull", body
    info = await client(session, url, kind="NixlConnector").info()
    assert info.sampling_defaults == NO_DEFAULTS
    assert facts_of(info.fingerprint)["output.sampling_defaults"] == "unknown"


async def test_a_leg_is_no_sign_of_life(
    server: FakeVllm, session: aiohttp.ClientSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Successive legs do not keep an unconfirmed identity."""
    clock = [100.0]
    monkeypatch.setattr(vllm_client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    server.started = 1.7e9
    engine = client(session, url)
    planned = msgspec.structs.replace(ask(), identity=token_identity((await engine.info()).fingerprint))
    clock[0] += 0.6 * vllm_client._UNSEEN_S
    await chunks(engine, planned)
    restart(server)
    clock[0] += 0.6 * vllm_client._UNSEEN_S
    with pytest.raises(IncompatiblePeerError):
        await chunks(engine, planned)


async def test_a_server_without_the_connector_or_the_role(
    server: FakeVllm, session: aiohttp.ClientSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = server.identity()
    server.identity = lambda: whole | {"roles": ["decode"]}
    with pytest.raises(RequestError, match="roles"):
        await client(session, url).info()
    server.identity = dict
    with pytest.raises(ProtocolError, match="BatonConnector"):
        await client(session, url).info()


async def test_its_clock_is_read_again(
    server: FakeVllm, session: aiohttp.ClientSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tickets expire by it, and clocks drift. A server that is too busy to answer keeps its identity."""
    asked, identity = client(session, url), server.identity()
    first = (await asked.info()).clock
    server.identity = lambda: identity | {"clock": 5e6}
    assert first <= (await asked.info()).clock < first + 60
    monkeypatch.setattr("baton.router.clients.vllm_client._CLOCK_S", 0.0)
    assert 5e6 <= (await asked.info()).clock < 5e6 + 60
    server.identity = dict
    assert 5e6 <= (await asked.info()).clock < 5e6 + 60


async def test_nixl_servers_are_known_by_their_metrics(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    with pytest.raises(ProtocolError, match="NIXL connectors"):
        await client(session, url, kind="NixlConnector").info()
    server.kind, server.num_drafts = "push", 3
    info = await client(session, url, kind="NixlPushConnector").info()
    assert (info.engine_id, info.num_speculative_tokens) == (url, 3)
    assert server.asked == [], "a request would hold a block for a while"


async def test_load_comes_from_its_metrics(session: aiohttp.ClientSession, url: str) -> None:
    load = await client(session, url).load()
    assert (load.num_running, load.kv_usage) == (3, 0.5)


async def test_a_leg_is_one_completion_without_stop_strings(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    request = ask(max_tokens=2, seed=5, sample_index=2, stop_token_ids=(9,), logprobs=1, stop=("x",))
    found = await chunks(client(session, url), request, kv_transfer_params={"x": 1})
    assert [c.token_ids for c in found] == [[token_at(4)], [token_at(5)]]
    assert [(c.position, c.finish_reason) for c in found] == [(0, None), (1, "length")]
    sent = server.asked[-1]
    assert (sent["prompt"], sent["kv_transfer_params"], sent["request_id"]) == (PROMPT, {"x": 1}, "r")
    assert (sent["max_tokens"], sent["seed"], sent["stop_token_ids"], sent["logprobs"]) == (2, 7, [9], 1)
    assert sent["min_p"] == 0.0, "or the model's own default would count"
    assert "stop" not in sent, "the router finds stop strings itself"


def test_a_choice_becomes_a_chunk() -> None:
    logprobs = Logprobs([-0.1], [{"token_id:8": -2.0, "token_id:6": -0.1}])
    chunk = to_chunk(ask(logprobs=2), Choice([6], "stop", 9, logprobs), 3)
    assert (chunk.token_ids, chunk.position, chunk.finish_reason, chunk.stop_reason) == ([6], 3, "stop", 9)
    assert chunk.logprobs == [TokenLogprobs(-0.1, [(6, -0.1), (8, -2.0)])]
    failed = to_chunk(ask(), Choice([], "error"), 3)
    assert failed.recoverable
    assert (failed.error or "").startswith("engine_error")


async def test_a_first_token_ends_a_leg_and_not_the_request(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    engine = client(session, url)

    async def both(request: GenerateRequest) -> list[tuple[list[int], str | None]]:
        (streamed,) = await chunks(engine, request, first_only=True)
        whole, _ = await engine.first_token(request, {"do_remote_decode": True})
        return [(c.token_ids, c.finish_reason) for c in (streamed, whole)]

    assert await both(ask(min_tokens=3)) == [([token_at(4)], None)] * 2
    assert {(b["max_tokens"], b["min_tokens"]) for b in server.asked[-2:]} == {(1, 1)}
    assert await both(ask(max_tokens=1)) == [([token_at(4)], "length")] * 2
    server.eos_at = 4
    assert await both(ask()) == [([257], "stop")] * 2


async def test_a_first_token_does_not_wait_for_the_event_with_the_metrics(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    server.released = asyncio.Event()
    server.metrics = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0}
    leg = client(session, url).leg(msgspec.structs.replace(ask(), timings=True), first_only=True)
    first = await asyncio.wait_for(anext(leg), 60.0)
    assert (first.token_ids, first.finish_reason, first.timings) == ([token_at(4)], None, None)
    server.released.set()
    (last,) = [chunk async for chunk in leg]
    assert (last.token_ids, last.finish_reason, last.timings) == ([], None, LegTimings(started=0.001, sampled=0.003))


async def test_a_resumed_request_goes_on_at_its_position(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    found = await chunks(client(session, url), ask(known=2, min_tokens=3))
    assert [chunk.position for chunk in found] == list(range(2, 8))
    assert (server.asked[-1]["max_tokens"], server.asked[-1]["min_tokens"]) == (6, 1)


def test_noise_is_of_the_position_and_the_sample() -> None:
    """A server draws from the start of its seed's noise: tokens after known ones must not reuse their noise."""
    legs = [body(ask(known=known, seed=2**63 - 1, sample_index=index)) for known in range(3) for index in range(3)]
    seeds = [leg["seed"] for leg in legs]
    noise = {tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds}
    assert len(noise) == len(seeds), "on CPUs PyTorch uses the lower 32 bits of a seed"
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert body(ask(seed=5), first_only=True)["seed"] == body(ask(seed=5))["seed"] == 5


@pytest.mark.parametrize(
    ("given", "index", "sent"), [(-5, 0, -5), (-5, 2, -3), (-(2**63), 0, -(2**63)), (-2, 1, 2**63 - 1)]
)
def test_a_negative_seed_is_vllms(given: int, index: int, sent: int) -> None:
    """Except -1, which means none there."""
    assert body(ask(seed=seed_word(given), sample_index=index))["seed"] == sent


@pytest.mark.parametrize("name", ["BatonConnector", "NixlConnector"])
def test_penalties_do_not_survive_a_resumption(name: str) -> None:
    kind = connector(name)
    assert kind.can_resume(SamplingParams(repetition_penalty=1.2, logit_bias={1: 2.0}))
    assert not kind.can_resume(SamplingParams(presence_penalty=0.1))
    assert not kind.can_resume(SamplingParams(frequency_penalty=0.1))


def test_grammars_go_to_the_server_and_do_not_survive_a_resumption() -> None:
    asked = StructuredOutputsParams(choice=("a", "b"))
    sent = msgspec.json.decode(msgspec.json.encode(body(ask(structured_outputs=asked))))
    assert sent["structured_outputs"] == {"choice": ["a", "b"]}
    assert "structured_outputs" not in body(ask())
    assert not connector("BatonConnector").can_resume(SamplingParams(structured_outputs=asked))


def test_bad_words_go_to_the_server_and_do_not_survive_a_resumption() -> None:
    """A server looks for the beginning of a word only in its own output."""
    assert "bad_words" not in body(ask())
    assert not connector("BatonConnector").can_resume(SamplingParams(bad_words=("a",)))


@pytest.mark.parametrize("first_only", [False, True])
def test_bad_words_go_with_every_leg(first_only: bool) -> None:
    assert body(ask(bad_words=("a", "b c")), first_only=first_only)["bad_words"] == ["a", "b c"]


async def test_comments_are_no_events(server: FakeVllm, session: aiohttp.ClientSession, url: str) -> None:
    server.comments = True
    found = await chunks(client(session, url), ask(max_tokens=2))
    assert [chunk.token_ids for chunk in found] == [[token_at(4)], [token_at(5)]]


async def test_the_first_event_repeats_a_long_prompt(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    request = GenerateRequest(
        request_id="r", prompt_token_ids=[123456] * 400_000, sampling_params=SamplingParams(max_tokens=1)
    )
    (chunk,) = await chunks(client(session, url), request)
    assert chunk.finish_reason == "length"


GARBAGE = {
    "no JSON": b"<html>",
    "no text": b'{"data": "\xff"}',
    "deep": b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no model": b'{"data": []}',
    "no length": b'{"data": [{"id": "m", "root": "r", "max_model_len": null}]}',
    "too long": b" " * (16 * 2**20 + 1),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_a_server_that_is_none(server: FakeVllm, session: aiohttp.ClientSession, url: str, what: str) -> None:
    server.raw["/v1/models"] = GARBAGE[what]
    with pytest.raises(ProtocolError):
        await client(session, url).info()


@pytest.mark.parametrize("metrics", [b"vllm:x nothing", b"\xff", b"vllm:num_requests_running NaN\nvllm:x +Inf"])
async def test_metrics_that_are_none(
    server: FakeVllm, session: aiohttp.ClientSession, url: str, metrics: bytes
) -> None:
    server.raw["/metrics"] = metrics
    if b"NaN" in metrics:
        assert (await client(session, url).load()).num_running == 0
        return
    with pytest.raises(ProtocolError):
        await client(session, url).load()


EVENTS = {
    "negative token": b'{"choices": [{"token_ids": [-1]}]}',
    "huge token": b'{"choices": [{"token_ids": [4294967296]}]}',
    "token as text": b'{"choices": [{"token_ids": ["1"]}]}',
    "deep": b'{"kv_transfer_params": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "no text": b'{"error": {"message": "\xff"}}',
    "uneven logprobs": b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [0.5], "top_logprobs": []}}]}',
    "token by its text": b'{"choices": [{"token_ids": [1], "logprobs": '
    b'{"token_logprobs": [0.5], "top_logprobs": [{"a": 0.5}]}}]}',
}


@pytest.mark.parametrize("what", EVENTS)
async def test_malformed_events(server: FakeVllm, session: aiohttp.ClientSession, url: str, what: str) -> None:
    engine = client(session, url)
    await engine.info()
    server.raw["/v1/completions"] = b"data: " + EVENTS[what] + b"\n\n"
    with pytest.raises(ProtocolError):
        await chunks(engine, ask(logprobs=1))
    server.raw["/v1/completions"] = EVENTS[what]
    with pytest.raises(ProtocolError):
        await engine.first_token(ask(logprobs=1), {})


async def test_failures_are_batons_own(server: FakeVllm, session: aiohttp.ClientSession, url: str) -> None:
    engine = client(session, url)
    server.fail = "cut"
    with pytest.raises(EngineLostError):
        await chunks(engine, ask())
    server.fail = "stream"
    with pytest.raises(HandoffError, match=r"engine_error: .*no memory"):
        await chunks(engine, ask())
    server.fail = "refuse"
    with pytest.raises(RequestError, match="no such thing"):
        await chunks(engine, ask())
    server.fail = "broken"
    with pytest.raises(EngineUnavailableError, match="no such thing"):
        await chunks(engine, ask())
    with pytest.raises(EngineUnavailableError):
        await asyncio.wait_for(client(session, "http://127.0.0.1:1").info(), 60)
