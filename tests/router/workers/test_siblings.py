"""Two processes of one router, here in one: whichever is asked answers for both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.router import RouterConfig, build_app
from baton.router.workers.binding import SharedBinding
from baton.router.workers.loads import LoadTable, RouterProcess, WorkerLoads
from baton.router.workers.siblings import Siblings, merge
from testkit.servers.fake_serving import ADMIN, ADMIN_TOKEN, KEY, FakeEngine, await_engines, join, served, status_of
from testkit.servers.fleets import QUICK, complete, engines


@contextlib.asynccontextmanager
async def both(sockets: Path, *urls: str) -> AsyncIterator[tuple[list[str], aiohttp.ClientSession, LoadTable]]:
    """A router of two processes over a prefill and a decode engine."""
    table = LoadTable(2)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        fronts = []
        for number in range(2):
            worker = RouterProcess(number, 2, sockets, WorkerLoads(table, number))
            config = RouterConfig(
                prefill=urls[:1],
                decode=urls[1:],
                ticket_key=KEY,
                admin_token=ADMIN_TOKEN,
                worker=worker,
                timers=QUICK,
            )
            fronts.append(await stack.enter_async_context(served(await build_app(config))))
        for front in fronts:
            await await_engines(session, front)
        yield fronts, session, table


def pair(directory: Path, **settings: Any) -> list[FakeEngine]:
    handed: dict[bytes, asyncio.Future[str]] = {}
    return [FakeEngine(directory, role=role, handed=handed, **settings) for role in ("prefill", "decode")]


async def test_metrics_and_status_are_those_of_all_processes(directory: Path, tmp_path: Path) -> None:
    async with engines(directory, *pair(directory)) as urls, both(tmp_path, *urls) as (fronts, session, _):
        for front in (fronts[0], fronts[0], fronts[1]):
            assert (await complete(session, front))[0] == 200
        for front in fronts:
            status = await status_of(session, front)
            assert status["handoffs"]["completed"] == status["decisions"]["handed_off"] == 3
            assert [engine["role"] for engine in status["engines"]] == ["prefill", "decode"]
            async with session.get(f"{front}/metrics") as response:
                text = await response.text()
            assert re.findall(r'router_handoffs_total\{outcome="completed"\} (.*)', text) == ["3.0"]
            assert re.findall(r"\nbaton:front_output_tokens_total (.*)", text) == ["90.0"]
            assert re.findall(r"\nbaton:time_to_first_token_seconds_count (.*)", text) == ["3.0"]
            assert re.findall(r'router_engine_up\{role="decode".*\} (.*)', text) == ["1.0"]


async def test_engines_join_and_leave_all_processes(directory: Path, tmp_path: Path) -> None:
    async with engines(directory, *pair(directory)) as urls, both(tmp_path) as (fronts, session, _):
        for url, role in zip(urls, ("prefill", "decode"), strict=True):
            await join(session, fronts[0], url, role)
        assert (await complete(session, fronts[1]))[0] == 200
        body = {"url": urls[0]}
        async with session.post(f"{fronts[1]}/instances/remove", json=body, headers=ADMIN) as response:
            assert response.status == 200
        for front in fronts:
            assert [engine["url"] for engine in (await status_of(session, front))["engines"]] == urls[1:]


async def test_a_process_that_replaces_another_has_the_engines_of_the_others(directory: Path, tmp_path: Path) -> None:
    """Those that joined later too, and without those that left. One that is refused ends no process."""
    changed = FakeEngine(directory, role="decode", fingerprint='{"weights": "b"}')
    async with engines(directory, changed, *pair(directory)) as urls:
        config = RouterConfig(decode=(urls[0],), prefill=(urls[1],), ticket_key=KEY, admin_token=ADMIN_TOKEN)
        table = LoadTable(2)

        def process(number: int) -> RouterConfig:
            worker = RouterProcess(number, 2, tmp_path, WorkerLoads(table, number))
            return dataclasses.replace(config, worker=worker, timers=QUICK)

        async with aiohttp.ClientSession() as session:
            first = await build_app(dataclasses.replace(process(0), decode=(), prefill=()))
            async with served(first) as front:
                for url, role in zip(urls[1:], ("prefill", "decode"), strict=True):
                    await join(session, front, url, role)
                async with served(await build_app(process(1))) as other:
                    assert [one["url"] for one in (await status_of(session, other))["engines"]] == urls[1:]
                # The first one's pool keeps an engine that comes back with other weights.
                changed.info, before = pair(directory)[1].info, changed.info
                await join(session, front, urls[0], "decode")
                changed.info = before
                async with served(await build_app(process(1))) as other:
                    found = {one["url"]: one["problem"] for one in (await status_of(session, other))["engines"]}
                    assert found.keys() == set(urls)
                    assert "weights" in found[urls[0]]
                    assert (await complete(session, other))[0] == 200


async def test_a_change_reaches_a_process_that_did_not_answer(tmp_path: Path) -> None:
    """Once, and in order, also if its answer is late."""
    table, seen, came = LoadTable(2), list[bytes](), asyncio.Event()
    one, other = (
        Siblings(RouterProcess(number, 2, tmp_path, WorkerLoads(table, number)), answer_s=0.3, again_s=0.01)
        for number in (0, 1)
    )

    async def note(body: bytes) -> None:
        seen.append(body)
        if len(seen) == 2:
            came.set()
        await asyncio.sleep(0.5)

    async with one.serving(list, dict, list, {}):
        await one.broadcast("drain", b"first")
        await one.broadcast("drain", b"second")
        async with other.serving(list, dict, list, {"drain": note}):
            await came.wait()
    assert seen == [b"first", b"second"]


async def test_all_processes_are_bound_to_the_model_that_one_has_served(directory: Path, tmp_path: Path) -> None:
    fleet = pair(directory)
    async with engines(directory, *fleet) as urls, both(tmp_path, *urls) as (fronts, session, _):
        assert (await complete(session, fronts[0]))[0] == 200
        for engine in fleet:
            new = {"incarnation": engine.info.incarnation + "'", "fingerprint": '{"weights": "b"}'}
            engine.info = msgspec.structs.replace(engine.info, **new)
        for front in fronts:
            while not all(one["problem"] for one in (await status_of(session, front))["engines"]):
                await asyncio.sleep(0.01)
        for front in fronts:
            assert (await complete(session, front))[0] == 503
        async with session.post(f"{fronts[1]}/instances/rebind", json={}, headers=ADMIN) as response:
            assert response.status == 200
        for front in fronts:
            await await_engines(session, front)
            assert (await complete(session, front))[0] == 200


def test_the_first_binding_counts_until_it_is_cleared() -> None:
    shared = SharedBinding()
    shared.bind(5, 100)
    shared.bind(7, 200)
    assert (shared.key, shared.max_model_len) == (5, 100)
    shared.clear()
    shared.bind(7, 200)
    assert (shared.key, shared.max_model_len) == (7, 200)


async def test_a_process_chooses_by_the_load_that_the_other_gave(directory: Path, tmp_path: Path) -> None:
    prefill, first = pair(directory)
    second = FakeEngine(directory, role="decode", handed=first.handed)
    go_on = first.pause = second.pause = asyncio.Event()
    async with (
        engines(directory, prefill, first, second) as urls,
        both(tmp_path, *urls) as (fronts, session, _),
    ):
        held = [asyncio.create_task(complete(session, fronts[0]))]
        while not first.running + second.running:
            await asyncio.sleep(0.01)
        taken = first if first.running else second
        held.append(asyncio.create_task(complete(session, fronts[1])))
        while first.running + second.running < 2:
            await asyncio.sleep(0.01)
        assert taken.running == 1
        status = await status_of(session, fronts[0])
        assert [engine["num_inflight"] for engine in status["engines"]][1:] == [1, 1]
        go_on.set()
        assert [answer[0] for answer in await asyncio.gather(*held)] == [200, 200]


async def test_a_process_that_does_not_answer_is_left_out(directory: Path, tmp_path: Path) -> None:
    async with engines(directory, *pair(directory)) as urls:
        config = RouterConfig(
            prefill=tuple(urls[:1]),
            decode=tuple(urls[1:]),
            ticket_key=KEY,
            worker=RouterProcess(0, 2, tmp_path, WorkerLoads(LoadTable(2), 0)),
        )
        async with served(await build_app(config)) as front, aiohttp.ClientSession() as session:
            assert (await complete(session, front))[0] == 200
            assert (await status_of(session, front))["handoffs"]["completed"] == 1


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [
        (1, 2, 3),
        (True, False, True),
        ("a", "b", "a"),
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": 4}, "e": 5}, {"a": 1, "b": {"c": 5, "d": 4}, "e": 5}),
        (None, 1, None),
    ],
)
def test_numbers_of_two_processes_are_added(own: Any, other: Any, found: Any) -> None:
    assert merge(own, other) == found
