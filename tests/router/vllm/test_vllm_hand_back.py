"""Cached KV of a vLLM decode server goes to the prefill server before it computes the rest."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from baton.handoff.protocol.ticket import request_digest, verify_ticket
from baton.kv.prefix import ROOT
from baton.kvevents.config import KVEventsConfig
from baton.kvevents.publisher import EventPublisher
from baton.kvevents.recorder import RecordedGroup
from baton.router import RouterConfig, build_app
from baton.router.clients.vllm_client import VllmClient
from baton.router.config.policy_config import PolicyConfig
from baton.router.connectors.vllm_prefix import VllmPrefixMove, prefix_request
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, LegRole, TokenChunk
from benchmarks.scrape import scrape
from testkit.servers.fake_serving import KEY, await_engines, served, status_of, until
from testkit.servers.fake_vllm import FakeVllm
from testkit.servers.fleets import QUICK
from testkit.servers.vllm_pair import Pair, complete, said

PROMPT = [10 + place % 200 for place in range(60)]
HELD = 32  # tokens, by D's events
SALT = b"tenant".hex()
GROUP = RecordedGroup(0, "full_attention", None, 16)


@contextlib.asynccontextmanager
async def routed(
    pair: Pair, tmp_path: Path, salt: str | None = None, limit_s: float = 100.0
) -> AsyncIterator[tuple[str, Any]]:
    """A router that D has told by events what it holds of the prompt."""
    events: dict[str, Any] = {f"{name}endpoint": f"ipc://{tmp_path}/{name}events" for name in ("", "replay_")}
    root = ROOT if salt is None else bytes.fromhex(salt)
    async with contextlib.AsyncExitStack() as stack:
        p, d = [await stack.enter_async_context(server.serve()) for server in (pair.p, pair.d)]
        publisher = EventPublisher(KVEventsConfig(enable_kv_cache_events=True, **events))
        stack.callback(publisher.close)
        for start in range(0, HELD, GROUP.block_size):
            parent = str(start - GROUP.block_size).encode() if start else None
            publisher.recorder.stored(
                GROUP, str(start).encode(), parent, root, PROMPT[start : start + GROUP.block_size]
            )
        config = RouterConfig(
            prefill=(p,),
            decode=(d,),
            engine="vllm",
            seed_first_token=pair.seed,
            ticket_key=KEY,
            timers=QUICK,
            kv_event_source=(f"{d}={events['endpoint']}",),
            kv_event_replay_source=(f"{d}={events['replay_endpoint']}",),
            policy_config=PolicyConfig(hand_back=True, hand_back_limit_s=limit_s),
        )
        url = await stack.enter_async_context(served(await build_app(config)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await await_engines(session, url)
        while sum(await scrape(session, url, "baton:router_engine_kv_blocks")) < HELD // GROUP.block_size:
            await asyncio.sleep(0.01)
        yield url, session


async def answered(url: str, session: Any, num_tokens: int = len(PROMPT), **body: Any) -> dict[str, Any]:
    """The router's counts of hand-backs after a prompt, whose answer is one server's whatever happens."""
    status, answer = await complete(session, url, prompt=PROMPT[:num_tokens], **body)
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == said(6, num_tokens)
    backs: dict[str, Any] = (await status_of(session, url))["hand_backs"]
    return backs


@pytest.mark.parametrize(("seed", "salt"), [(False, None), (True, None), (False, SALT)])
async def test_a_decode_server_hands_back_what_its_events_say(
    directory: Path, tmp_path: Path, seed: bool, salt: str | None
) -> None:
    pair = Pair(directory, seed=seed)
    async with routed(pair, tmp_path, salt) as (url, session):
        backs = await answered(url, session, **({} if salt is None else {"cache_salt": salt}))
    assert (backs["completed"], backs["failed"], backs["num_tokens"]) == (1, 0, HELD)
    (sent,), received = pair.d.legs("prefill"), pair.p.legs("decode")[0]
    assert sent["prompt"] == received["prompt"] == PROMPT[: HELD + 1], (
        "the last token is computed, the rest handed over"
    )
    assert (sent["max_tokens"], received["max_tokens"]) == (1, 1)
    assert sent["temperature"] == received["temperature"] == 0
    assert sent.get("cache_salt") == received.get("cache_salt") == salt
    assert pair.legs()[0] == ["decode", "prefill"], "the prompt's own leg comes afterwards, and nothing is cancelled"
    assert "cancel" not in pair.legs()[1]


@pytest.mark.parametrize(
    ("num_tokens", "extra", "moved", "destination"),
    [(60, 0, 32, 33), (60, 16, 32, 49), (40, 16, 16, 33), (HELD, 0, 16, 17)],
    ids=["windows", "and a drafter", "a shorter prompt", "a prompt that is held"],
)
async def test_windows_are_handed_back_in_whole_blocks(
    directory: Path, tmp_path: Path, num_tokens: int, extra: int, moved: int, destination: int
) -> None:
    """The destination computes one block more where it would not find the window otherwise."""
    pair = Pair(directory)
    for server in (pair.p, pair.d):
        server.identity = functools.partial(_with, server.own_identity, prefix_multiple=16, prefix_extra=extra)
    async with routed(pair, tmp_path) as (url, session):
        backs = await answered(url, session, num_tokens)
    assert (backs["completed"], backs["num_tokens"], backs["failures"]) == (1, moved, {})
    (sent,), received = pair.d.legs("prefill"), pair.p.legs("decode")[0]
    assert (sent["prompt"], received["prompt"]) == (PROMPT[: moved + 1], PROMPT[:destination])
    digest = request_digest(PROMPT[:moved], SamplingParams())
    ends: list[tuple[LegRole, FakeVllm, dict[str, Any]]] = [("prefill", pair.d, sent), ("decode", pair.p, received)]
    for role, server, leg in ends:
        params = leg["kv_transfer_params"]["baton"]
        assert verify_ticket(KEY, params["ticket"], role, server.identity()["clock"]).request_digest == digest
        assert params.get("num_tokens", 0) == (moved if role == "decode" else 0)
        assert params.get("whole_blocks", False) == (role == "decode")


@pytest.mark.parametrize("seed", [False, True])
@pytest.mark.parametrize(("blocks", "whole"), [((1, 1), True), ((32, 16), True), ((16, 32), False)])
async def test_a_decode_server_gets_windows_whole_if_its_blocks_lie_within_those_of_the_prefill_server(
    directory: Path, seed: bool, blocks: tuple[int, int], whole: bool
) -> None:
    pair = Pair(directory, seed=seed)
    for server, size in zip((pair.p, pair.d), blocks, strict=True):
        server.identity = functools.partial(_with, server.own_identity, prefix_multiple=size)
    async with pair.run() as (url, session):
        assert (await complete(session, url))[0] == 200
    (leg,) = pair.d.legs("decode")
    assert leg["kv_transfer_params"]["baton"].get("whole_blocks", False) == whole


def _with(identity: Callable[[], dict[str, Any]], **more: Any) -> dict[str, Any]:
    return identity() | more


@pytest.mark.parametrize(
    ("own", "reason"), [({"prefix_multiple": 64}, "other_blocks"), ({"prefix_extra": 50}, "too_short")]
)
async def test_a_destination_that_would_not_find_it_gets_nothing(
    directory: Path, tmp_path: Path, own: dict[str, Any], reason: str
) -> None:
    pair = Pair(directory)
    pair.p.identity = functools.partial(_with, pair.p.own_identity, **{"prefix_multiple": 16, **own})
    pair.d.identity = functools.partial(_with, pair.d.own_identity, prefix_multiple=16)
    async with routed(pair, tmp_path) as (url, session):
        backs = await answered(url, session)
    assert (backs["completed"], backs["failures"]) == (0, {reason: 1})
    assert (pair.d.legs("prefill"), pair.d.legs("cancel")) == ([], [])


@pytest.mark.parametrize("salt", ["another", None])
async def test_a_prefix_with_another_cache_salt_is_not_handed_back(
    directory: Path, tmp_path: Path, salt: str | None
) -> None:
    pair = Pair(directory)
    async with routed(pair, tmp_path, SALT) as (url, session):
        backs = await answered(url, session, **({} if salt is None else {"cache_salt": salt}))
    assert (backs["completed"], backs["failed"]) == (0, 0)
    assert pair.d.legs("prefill") == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("lacks", "prefix_missing"),
        ("refuses", "LegRefusedError"),
        ("stays", "timeout"),
        ("lost", "not_received"),
    ],
)
async def test_whatever_fails_the_prefill_server_computes(
    directory: Path, tmp_path: Path, fault: str, reason: str
) -> None:
    pair = Pair(directory)
    if fault == "lacks":
        pair.d.lacks_prefixes = True
    elif fault == "refuses":
        pair.d.fail, pair.d.fail_role = "broken", "prefill"
    elif fault == "stays":
        pair.d.halted = "prefill"
    else:
        pair.p.loses_prefixes = True
    async with routed(pair, tmp_path, limit_s=1.0 if fault == "stays" else 100.0) as (url, session):
        backs = await answered(url, session)
        assert (backs["completed"], backs["num_tokens"], backs["failures"]) == (0, 0, {reason: 1})
        # The source would hold its blocks for a destination that may never have seen its leg.
        await until(lambda: pair.d.legs("cancel"))
        cancelled, sent = pair.d.legs("cancel")[0], pair.d.legs("prefill")[0]
        assert cancelled["kv_transfer_params"]["baton"]["ticket"] == sent["kv_transfer_params"]["baton"]["ticket"]
        if fault in ("lacks", "stays"):
            await until(lambda: "prefill" in pair.d.left)


@pytest.mark.parametrize(
    ("fact", "reason"), [({"roles": ["decode"]}, "no_such_role"), ({"moves_prefixes": False}, "no_prefix_cache")]
)
async def test_a_server_that_cannot_hand_back_is_not_asked(
    directory: Path, tmp_path: Path, fact: dict[str, Any], reason: str
) -> None:
    """A server that takes decode legs only (`kv_role` kv_consumer) would compute the prompt without a handoff."""
    pair = Pair(directory)
    pair.d.identity = lambda: pair.d.own_identity() | fact
    async with routed(pair, tmp_path) as (url, session):
        backs = await answered(url, session)
    assert (backs["completed"], backs["failures"]) == (0, {reason: 1})
    assert pair.d.legs("prefill") == []


async def test_the_sources_leg_is_read_to_its_end() -> None:
    """Closing it earlier would abort it while its blocks are being sent."""
    sent, read = asyncio.Event(), list[str]()

    class Server:
        async def leg(self, request: GenerateRequest, params: dict[str, object]) -> AsyncGenerator[TokenChunk, None]:
            await sent.wait()
            yield TokenChunk(request_id=request.request_id, finish_reason="length")
            read.append(request.request_id)

        async def first_token(self, request: GenerateRequest, params: dict[str, object]) -> tuple[TokenChunk, Any]:
            return TokenChunk(request_id=request.request_id), {"baton": {"num_tokens": HELD}}

    asked = GenerateRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams())
    server, request = cast(VllmClient, Server()), prefix_request(asked, HELD + 1)
    move = VllmPrefixMove(server, server, request, request, "ticket", HELD)
    source = move.leg("prefill", HELD, 0, None)
    assert (await anext(source)).num_cached_tokens == HELD
    assert [chunk.num_cached_tokens async for chunk in move.leg("decode", HELD, 0, None)] == [HELD]
    rest = asyncio.ensure_future(anext(source, None))
    await asyncio.sleep(0)
    sent.set()
    assert await rest is None
    assert read == [request.request_id]
