"""The lifetime of a router's tickets, and engines that refuse them, or each other."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.handoff.protocol.ticket import verify_ticket
from baton.router.connectors.base import ConnectorConfig
from baton.router.connectors.tickets import mint_ticket
from baton.router.pairs import Pairs
from baton.router.pooled_engine import PooledEngine
from testkit.servers.fake_serving import FakeEngine, status_of
from testkit.servers.fleets import QUICK, Cluster, bare, complete, expected_answer

KEY = b"k" * 32


def engine(name: str, clock: float) -> Any:
    info = SimpleNamespace(
        engine_id=name, incarnation=f"{name}-1", control_addresses=["tcp://127.0.0.1:1"], clock=clock
    )
    return SimpleNamespace(info=info, answered=asyncio.get_running_loop().time())


async def test_a_ticket_lives_as_long_as_the_router_is_told() -> None:
    p, d = engine("P", 1000.0), engine("D", 77.0)
    ticket = verify_ticket(
        KEY, mint_ticket(ConnectorConfig(KEY, ticket_life_s=30.0), p, d, "push", bytes(32)), "prefill", 1000.0
    )
    assert 30.0 <= ticket.prefill_expiry - 1000.0 < 60.0
    assert 30.0 <= ticket.decode_expiry - 77.0 < 60.0


def give_other_key(*engines: FakeEngine) -> None:
    for engine in engines:
        engine.ticket_key = b"o" * 32


async def alarms(session: aiohttp.ClientSession, url: str) -> list[str]:
    return [text for text in (await status_of(session, url))["alarms"] if "another ticket key" in text]


async def assert_served(session: aiohttp.ClientSession, url: str, expected: Any) -> None:
    status, answer = await complete(session, url)
    assert status == 200, answer
    assert bare(answer) == expected


@pytest.mark.parametrize(
    ("other", "counts", "why"),
    [
        (["p0"], (1, 1), "no_prefill_engine"),
        (["d0"], (1, 1), "no_decode_engine"),
        (["p0", "p1"], (2, 1), "no_prefill_engine"),
        (["p0"], (2, 1), "handed_off"),
        (["d0"], (1, 2), "handed_off"),
        (["p0", "d0"], (2, 2), "handed_off"),
    ],
)
async def test_engines_with_another_key_cost_no_request(
    directory: Path, other: list[str], counts: tuple[int, int], why: str
) -> None:
    """The first request that meets one is served elsewhere, `/status` names it, and it gets no others."""
    cluster = Cluster(directory, *counts)
    engines = {f"p{i}": one for i, one in enumerate(cluster.prefills)}
    engines |= {f"d{i}": one for i, one in enumerate(cluster.decodes)}
    strangers = [engines[name] for name in other]
    give_other_key(*strangers)
    async with cluster.run() as (url, session):
        expected = await expected_answer(directory, session)
        for _ in range(4):
            await assert_served(session, url, expected)
        # Two, if both legs of the first request were refused.
        assert {len(one.requests) for one in strangers} <= {1, 2}
        assert len(await alarms(session, url)) == len(strangers)
        state = await status_of(session, url)
        assert sum(engine["healthy"] for engine in state["engines"]) == sum(counts) - len(strangers)
        assert state["handoffs"]["failures"] == {"refused": len(strangers)}
        assert state["decisions"][why] >= 3


async def test_no_request_waits_for_engines_that_refuse_all_tickets(directory: Path) -> None:
    """They come back only with another key, so the error comes at once. A client waits for the patience otherwise."""
    cluster = Cluster(directory, 1, 1)
    give_other_key(*cluster.prefills, *cluster.decodes)
    async with cluster.run(timers=dataclasses.replace(QUICK, patience=3600.0)) as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
        assert "another ticket key" in answer["error"]["message"]


async def test_all_engines_have_another_key(directory: Path) -> None:
    cluster = Cluster(directory, 1, 1)
    give_other_key(*cluster.prefills, *cluster.decodes)
    async with cluster.run(recovery="none") as (url, session):
        answers = [await complete(session, url) for _ in range(3)]
        assert [status for status, _ in answers] == [503] * 3
        assert [answer["error"]["code"] for _, answer in answers] == ["refused", "refused", "engine_unavailable"]
        assert "another ticket key" in answers[2][1]["error"]["message"]
        assert len(await alarms(session, url)) == 2
        async with session.get(f"{url}/health") as response:
            assert response.status == 503


async def test_an_engine_is_used_again_once_it_restarts_with_the_key(directory: Path) -> None:
    cluster = Cluster(directory, 1, 1)
    (prefill,) = cluster.prefills
    key = prefill.ticket_key
    give_other_key(prefill)
    async with cluster.run() as (url, session):
        assert (await complete(session, url))[0] == 200
        assert len(await alarms(session, url)) == 1
        prefill.ticket_key, prefill.info = key, msgspec.structs.replace(prefill.info, incarnation="2")
        while await alarms(session, url):
            await asyncio.sleep(0.01)
        assert (await complete(session, url))[0] == 200
        assert (await status_of(session, url))["handoffs"]["completed"] == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_only_one_engine_refuses(directory: Path, role: str) -> None:
    """Another reason may hold for this request alone: the other engine serves it, and the next is tried again."""
    cluster = Cluster(directory, 1, 1)
    (refusing,) = cluster.prefills if role == "prefill" else cluster.decodes
    refusing.fail = "refuse leg"
    async with cluster.run() as (url, session):
        expected = await expected_answer(directory, session)
        for number in (1, 2):
            await assert_served(session, url, expected)
            assert len(refusing.requests) == number
        assert all(engine["healthy"] for engine in (await status_of(session, url))["engines"])


@pytest.mark.parametrize("reason", ["incompatible_peer", "unreachable_peer", "unhealthy_peer"])
@pytest.mark.parametrize(("num_prefill", "why"), [(1, "no_prefill_engine"), (2, "handed_off")])
async def test_engines_that_refuse_each_other_cost_no_request(
    directory: Path, reason: str, num_prefill: int, why: str
) -> None:
    """The first handoff tells the router, which names the pair and uses others."""
    cluster = Cluster(directory, num_prefill, 1)
    for number, engine in enumerate(cluster.prefills):
        engine.info = msgspec.structs.replace(engine.info, engine_id=f"p{number}", incarnation=f"p{number}")
    cluster.decodes[0].parted["p0"] = f"{reason}: the one thing differs"
    async with cluster.run() as (url, session):
        expected = await expected_answer(directory, session)
        for _ in range(4):
            await assert_served(session, url, expected)
        state = await status_of(session, url)
        assert len(cluster.prefills[0].requests) == 1
        (alarm,) = state["alarms"]
        assert cluster.url_of[cluster.prefills[0]] in alarm
        assert cluster.url_of[cluster.decodes[0]] in alarm
        assert alarm.endswith(f"{reason}: the one thing differs")
        assert state["handoffs"]["failures"] == {reason: 1}
        assert state["handoffs"]["failed"] == 1
        assert (state["handoffs"]["completed"] >= 3) == (num_prefill > 1)
        assert state["decisions"][why] >= 3
        # After a restart they are tried again.
        cluster.prefills[0].info = msgspec.structs.replace(cluster.prefills[0].info, incarnation="new")
        while (await status_of(session, url))["alarms"]:
            await asyncio.sleep(0.01)
        assert [(await complete(session, url))[0] for _ in range(2)] == [200, 200]
        assert len(cluster.prefills[0].requests) >= 2


async def test_no_token_of_an_incompatible_engine_is_continued_from(directory: Path) -> None:
    """The decode engine computes the first token too. If it differs, the request fails."""
    cluster = Cluster(directory, 1, 1)
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    decode.parted[prefill.info.incarnation] = "incompatible_peer: the one thing differs"
    prefill.tokens = prefill.tokens[5:]
    async with cluster.run() as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["code"]) == (500, "token_mismatch")
        assert bare((await complete(session, url))[1]) == await expected_answer(directory, session)


def in_pool(name: str, role: str, protocol: int = 0) -> PooledEngine:
    info = SimpleNamespace(engine_id=name, incarnation=name, protocol=protocol)
    return PooledEngine(None, role, info, problem=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "pause_s"), [("no_room", None), ("unreachable_peer", 30.0), ("incompatible_peer", math.inf)]
)
def test_a_refused_pair_is_due_for_a_trial_once_a_pause(reason: str, pause_s: float | None) -> None:
    now = 0.0
    pairs = Pairs(30.0, lambda: now)
    p, d = in_pool("p", "prefill"), in_pool("d", "decode")
    pairs.note(p, d, f"{reason}: why")
    assert pairs.why_not(p, d) == (f"{reason}: why" if pause_s else None)
    assert pairs.why_not(d, p) is None
    for _ in range(2):
        assert pairs.due([p, d]) == []
        now += 30.5
        assert pairs.due([p, d]) == ([(p, d)] if pause_s == 30.0 else [])
        # No request uses it before the trial has worked.
        assert pairs.refused([p, d]) == ([(p, d, f"{reason}: why")] if pause_s else [])
    pairs.worked(p, d)
    assert pairs.refused([p, d]) == []


def test_engines_of_two_protocol_versions_are_never_a_pair() -> None:
    pairs = Pairs(30.0)
    old, new, unknown = in_pool("p", "prefill", 8), in_pool("d", "decode", 9), in_pool("e", "decode")
    assert pairs.why_not(old, unknown) is None
    ((p, d, why),) = pairs.refused([old, new, unknown])
    assert (p, d) == (old, new)
    assert why == "incompatible_peer: the handoff protocol has version 8 at P, 9 at D"


@pytest.mark.parametrize("mended", [True, False])
async def test_the_router_tries_a_pair_that_refused_each_other_itself(directory: Path, mended: bool) -> None:
    """Clients' requests go elsewhere until its trial has worked."""
    cluster = Cluster(directory, 1, 1)
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    decode.parted[prefill.info.incarnation] = "unreachable_peer: no answer"
    async with cluster.run(timers=dataclasses.replace(QUICK, trial=0.1)) as (url, session):
        expected = await expected_answer(directory, session)
        await assert_served(session, url, expected)
        if mended:
            decode.parted.clear()
            while (await status_of(session, url))["alarms"]:
                await asyncio.sleep(0.01)
        else:
            while len(prefill.requests) < 3:
                await asyncio.sleep(0.01)
        for _ in range(3):
            await assert_served(session, url, expected)
        of_clients = [one for one in prefill.requests if not one.request_id.startswith("trial-")]
        assert len(of_clients) == (4 if mended else 1)
        assert bool((await status_of(session, url))["alarms"]) is not mended
