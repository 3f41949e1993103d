"""Where requests run: handed off if that pays, otherwise on one engine, and never with a wrong token."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.openai.http.app import DRAIN
from baton.router.prefixes import BLOCK_TOKENS, EXPIRY_S, KnownPrefixes, PromptBlocks, chain_of
from baton.router.timers import RouterTimers
from testkit.servers.fake_serving import ADMIN, ADMIN_TOKEN, FakeEngine, status_of, until
from testkit.servers.fleets import Cluster, bare, complete, expected_answer, recoveries

LONG = "a long prompt of which all tokens are bytes, and so " * 3


def holding(cluster: Cluster) -> Cluster:
    """Engines that find handed-over prompts in their caches again."""
    for engine in cluster.prefills + cluster.decodes:
        engine.info = msgspec.structs.replace(engine.info, kv_tokens=4096, prefix_step=1)
    return cluster


async def decisions(session: Any, url: str) -> dict[str, Any]:
    found = (await status_of(session, url))["decisions"]
    return {name: count for name, count in found.items() if count and name not in ("summary", "last")}


def test_known_prefixes_are_matched_and_forgotten() -> None:
    tokens = list(range(5 * BLOCK_TOKENS + 3))
    chain = chain_of(tokens)
    assert len(chain) == 5
    assert chain_of(tokens[: 2 * BLOCK_TOKENS]) == chain[:2]
    assert not set(chain_of(tokens, "salt")) & set(chain)
    assert not set(chain_of([7, *tokens])) & set(chain)
    longer = PromptBlocks(tokens, "a").followed_by([8] * BLOCK_TOKENS).chain()
    assert longer == chain_of([*tokens, *[8] * BLOCK_TOKENS], "a")
    begun = [bytes([number]) for number in range(5)]
    assert all(a is b for a, b in zip(begun, chain_of(tokens, "a", begun), strict=True)), "nothing is hashed twice"
    prompt, now = PromptBlocks(tokens), [0.0]
    known = KnownPrefixes(1, 4 * BLOCK_TOKENS, lambda: now[0])
    known.learn(prompt)
    assert known.num_tokens(prompt) == 4 * BLOCK_TOKENS, "no more than the engine holds"
    assert known.num_tokens(PromptBlocks([7, *tokens])) == 0
    assert known.num_tokens(PromptBlocks(tokens, "salt")) == 0
    assert known.num_tokens(PromptBlocks(tokens[: 2 * BLOCK_TOKENS])) == 2 * BLOCK_TOKENS - 1, "one is computed"
    other = PromptBlocks([7] * (2 * BLOCK_TOKENS + 1))
    known.learn(other)
    assert known.num_tokens(prompt) == 2 * BLOCK_TOKENS, "the ends of what was used first have gone"
    known.forget(prompt)
    assert (known.num_tokens(prompt), known.num_tokens(other)) == (0, 2 * BLOCK_TOKENS)
    now[0] = EXPIRY_S
    assert known.num_tokens(other) == 0, "a guess expires"
    coarse = KnownPrefixes(3 * BLOCK_TOKENS, 99 * BLOCK_TOKENS)
    coarse.learn(prompt)
    assert coarse.num_tokens(prompt) == 3 * BLOCK_TOKENS
    nothing = KnownPrefixes(0, 99 * BLOCK_TOKENS)
    nothing.learn(prompt)
    assert nothing.num_tokens(prompt) == 0


async def test_a_prompt_that_the_decode_engine_holds_needs_no_prefill_engine(directory: Path) -> None:
    cluster = holding(Cluster(directory, num_prefill=1, num_decode=2))
    async with cluster.run(max_local_prefill_length=40) as (url, session):
        expected = await expected_answer(directory, session, prompt=LONG)
        for _ in range(2):
            assert bare((await complete(session, url, prompt=LONG))[1]) == expected
        assert await decisions(session, url) == {"handed_off": 1, "cached": 1}
        await until(lambda: cluster.prefills[0].running == 0)
        cluster.stop(cluster.prefills[0])
        assert bare((await complete(session, url, prompt=LONG))[1]) == expected
        assert len(cluster.prefills[0].requests) == 1
        # The engine that holds the prompt is used, whatever the policy.
        assert sorted(len(engine.requests) for engine in cluster.decodes) == [0, 3]
        cluster.cont(cluster.prefills[0])
        assert bare((await complete(session, url))[1]) == await expected_answer(directory, session)
        assert await decisions(session, url) == {"handed_off": 1, "cached": 2, "short": 1}
        for salt in ("x", "y"):
            assert (await complete(session, url, prompt=LONG, cache_salt=salt))[0] == 200
        assert await decisions(session, url) == {"handed_off": 3, "cached": 2, "short": 1}
        summary = (await status_of(session, url))["decisions"]["summary"]
        assert summary == "3 of the last 6 handed off, 3 local: cached 2, short 1"
        async with session.get(f"{url}/metrics") as response:
            assert 'baton:router_decisions_total{why="cached"} 2.0' in await response.text()


async def test_an_engine_that_has_evicted_it_declines(directory: Path) -> None:
    """Nothing is recomputed silently, whatever the recovery setting."""
    cluster = holding(Cluster(directory, num_prefill=1, num_decode=1))
    async with cluster.run(max_local_prefill_length=40, recovery="none") as (url, session):
        expected = await expected_answer(directory, session, prompt=LONG)
        assert bare((await complete(session, url, prompt=LONG))[1]) == expected
        cluster.decodes[0].fail = "evicted"
        assert bare((await complete(session, url, prompt=LONG))[1]) == expected
        assert await decisions(session, url) == {"handed_off": 2, "stale": 1}
        assert await recoveries(session, url) == {}
        before = cluster.decodes[0].requests[-2]
        assert (before.max_prefill_tokens, before.handoff and before.handoff.role) == (40, "alone")


async def test_a_restarted_engine_holds_nothing(directory: Path) -> None:
    cluster = holding(Cluster(directory, num_prefill=1, num_decode=1))
    async with cluster.run(max_local_prefill_length=40) as (url, session):
        assert (await complete(session, url, prompt=LONG))[0] == 200
        engine = cluster.decodes[0]
        engine.info = msgspec.structs.replace(engine.info, incarnation="2")

        async def seen() -> bool:
            return bool((await status_of(session, url))["engines"][1]["info"]["incarnation"] == "2")

        while not await seen():
            pass
        assert (await complete(session, url, prompt=LONG))[0] == 200
        assert await decisions(session, url) == {"handed_off": 2}


@pytest.mark.parametrize(("gone", "why"), [("prefill", "no_prefill_engine"), ("decode", "no_decode_engine")])
@pytest.mark.parametrize("how", ["silent", "down"])
async def test_one_role_does_all_when_the_other_is_gone(directory: Path, gone: str, why: str, how: str) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    lost: FakeEngine = (cluster.prefills if gone == "prefill" else cluster.decodes)[0]
    async with cluster.run(timers=RouterTimers(check=0.05, answer=0.3, lease=60.0)) as (url, session):
        if how == "silent":
            cluster.stop(lost)
        else:
            lost.load = _down  # type: ignore[method-assign]

        async def seen() -> bool:
            async with session.get(f"{url}/health") as response:
                assert response.status == 200
            return not all(engine["healthy"] for engine in (await status_of(session, url))["engines"])

        while not await seen():
            pass
        status, answer = await complete(session, url)
        assert status == 200
        assert bare(answer) == await expected_answer(directory, session)
        assert await decisions(session, url) == {why: 1}
        state = await status_of(session, url)
        assert why.replace("_", " ") in state["decisions"]["summary"]


async def test_attempts_after_a_loss_count_where_they_ran(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An alarm on `no_decode_engine` must also see requests that began as handoffs."""
    caplog.set_level(logging.INFO, "baton")
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    lost = cluster.decodes[0]
    lost.fail, lost.when_lost = "lost", lambda: setattr(lost, "load", _down)
    async with cluster.run(timers=RouterTimers(check=60.0, answer=5.0)) as (url, session):
        status, answer = await complete(session, url)
        assert status == 200
        assert bare(answer) == await expected_answer(directory, session)
        assert await decisions(session, url) == {"handed_off": 1, "no_decode_engine": 1}
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        assert 'baton:router_decisions_total{why="no_decode_engine"} 1.0' in text
    line = next(record.fields for record in caplog.records if record.name == "baton.openai.records")
    assert (line["where"], line["engines"]) == ("no_decode_engine", "prefill-engine")


async def test_each_change_by_an_operator_is_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.router")
    cluster = Cluster(directory)
    async with cluster.run(admin_token=ADMIN_TOKEN) as (url, session):
        urls = [engine["url"] for engine in (await status_of(session, url))["engines"]]
        for what, which in (("remove", 0), ("add", 0), ("drain", 3)):
            body = {"url": urls[which]} | ({"role": "prefill"} if what == "add" else {})
            async with session.post(f"{url}/instances/{what}", json=body, headers=ADMIN) as response:
                assert response.status == 200
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        assert f'baton:router_engine_draining{{role="prefill",url="{urls[0]}"}} 0.0' in text
    assert [message for message in caplog.messages if "engine" in message][4:] == [
        f"engine {urls[0]} is removed; 0 legs on it go on",
        f"engine {urls[0]}: prefill-engine joins as prefill",
        f"engine {urls[3]} is drained; 0 legs are on it",
        f"engine {urls[3]} has left",
    ]


def _down() -> Any:
    from baton.errors import EngineUnavailableError

    raise EngineUnavailableError("it is gone")


async def test_a_stream_that_lost_the_only_decode_engine_ends_on_the_prefill_engine(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    engine = cluster.decodes[0]
    engine.fail = "dies"
    engine.load = lambda: _down() if engine.fail == "down" else FakeEngine.load(engine)  # type: ignore[method-assign]
    async with cluster.run() as (url, session):
        _, answer = await complete(session, url)
        assert bare(answer) == await expected_answer(directory, session)
        assert await recoveries(session, url) == {"full": 1}
        last = cluster.prefills[0].requests[-1]
        assert (last.handoff and last.handoff.role, last.num_prompt_tokens) == ("alone", 1)


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_is_drained_and_then_gone(directory: Path, role: str, hurry: bool) -> None:
    cluster = Cluster(directory)
    some = cluster.prefills if role == "prefill" else cluster.decodes
    go_on = asyncio.Event()
    for engine in some:
        engine.pause = go_on
    async with cluster.run(admin_token=ADMIN_TOKEN) as (url, session):
        expected = await expected_answer(directory, session)
        first = [asyncio.create_task(complete(session, url)) for _ in range(4)]
        await until(lambda: some[0].running == 2)
        target = (await status_of(session, url))["engines"][0 if role == "prefill" else 2]["url"]

        async def drain() -> tuple[int, Any]:
            async with session.post(f"{url}/instances/drain", json={"url": target}, headers=ADMIN) as response:
                return response.status, await response.json()

        status, described = await drain()
        assert (status, described["draining"], described["healthy"]) == (200, True, False)
        state = next(e for e in (await status_of(session, url))["engines"] if e["url"] == target)
        assert (state["draining"], state["num_inflight"]) == (True, 2)
        if hurry:
            assert (await drain())[0] == 200
        second = [asyncio.create_task(complete(session, url)) for _ in range(3)]
        await until(lambda: len(some[1].requests) >= 5)
        go_on.set()
        for status, answer in await asyncio.gather(*first, *second):
            assert (status, bare(answer)) == (200, expected)
        assert len(some[0].requests) == 2, "nothing new"
        # Without its prefill leg a decode engine recomputes by itself.
        assert await recoveries(session, url) == ({"full": 2} if hurry and role == "decode" else {})
        assert target not in [e["url"] for e in (await status_of(session, url))["engines"]]
        assert (await drain())[0] == 400


async def test_an_engine_that_is_told_to_end_says_so(directory: Path) -> None:
    cluster = Cluster(directory, num_decode=1)
    async with cluster.run() as (url, session):
        expected = await expected_answer(directory, session)
        app = cluster.apps[cluster.decodes[0]]
        app[DRAIN].begin()

        async def state() -> Any:
            return (await status_of(session, url))["engines"][2]

        while not (await state())["draining"]:
            pass
        assert "is draining" in (await state())["problem"]
        assert bare((await complete(session, url))[1]) == expected
        assert await decisions(session, url) == {"no_decode_engine": 1}
        app[DRAIN].begun = False
        while (await state())["draining"]:
            pass
        assert (await state())["healthy"]
