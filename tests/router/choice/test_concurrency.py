"""At most as many requests run as the engines decode at once; the others wait in order, and leave no trace if they
leave.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.event_loop import timeout
from baton.router import RouterConfig, build_app
from baton.router.admission import concurrency
from baton.router.admission.concurrency import ConcurrencyLimit
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, FakeEngine, complete, served


async def test_first_come_first_served_and_never_more() -> None:
    limit, begun, most = ConcurrencyLimit(lambda: 2), [], 0

    async def request(number: int) -> None:
        nonlocal most
        async with limit.slot():
            begun.append(number)
            most = max(most, limit.num_running)
            await asyncio.sleep(0.001 * (number % 3))

    tasks = []
    for number in range(40):
        tasks.append(asyncio.create_task(request(number)))
        await asyncio.sleep(0)
    leaving = tasks[5::7]
    for task in leaving:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == sorted(begun)
    assert len(begun) >= 40 - len(leaving)
    assert most == 2
    assert limit.num_running == 0
    async with timeout(60), limit.slot():
        pass


@pytest.mark.parametrize("later", [None, 3])
async def test_room_that_comes_later_is_taken(later: int | None) -> None:
    capacity: int | None = 1
    limit = ConcurrencyLimit(lambda: capacity)
    other = limit.slot()
    async with limit.slot():
        waiting = asyncio.create_task(other.__aenter__())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        capacity = later
        await asyncio.wait_for(waiting, 60)
        assert limit.num_running == 2
    await other.__aexit__(None, None, None)


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("wakes", ["room", "time"])
async def test_a_client_that_leaves_as_its_turn_comes_is_cancelled(
    turns: int, wakes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that coincides with a free place, or with the next check for one, is not lost."""
    if wakes == "time":
        monkeypatch.setattr(concurrency, "_LOOK_AGAIN_S", 0.0)
    limit = ConcurrencyLimit(lambda: 1)
    entered = False

    async def request() -> None:
        nonlocal entered
        async with limit.slot():
            entered = True
            await asyncio.sleep(3600)

    first = limit.slot()
    await first.__aenter__()
    task = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    await first.__aexit__(None, None, None)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
    assert limit.num_running == 0
    async with timeout(60), limit.slot():
        pass


async def test_a_waiting_request_has_begun_on_no_engine(directory: Path) -> None:
    """The engine does not know of it, and beyond the queue's limit it is refused."""
    engine = FakeEngine(directory, length=40)
    engine.pause = asyncio.Event()
    engine.info = msgspec.structs.replace(engine.info, max_num_seqs=2)
    app = build_engine_app(engine, Tokenizer.load(directory))
    async with aiohttp.ClientSession() as session, served(app) as url:
        config = RouterConfig(both=(url,), ticket_key=KEY, max_queued_requests=3)
        async with served(await build_app(config)) as front:
            asked: list[Any] = [asyncio.create_task(complete(session, front, max_tokens=40)) for _ in range(2)]
            while engine.running < 2:
                await asyncio.sleep(0.005)
            asked += [asyncio.create_task(complete(session, front, max_tokens=40)) for _ in range(6)]
            while sum(task.done() for task in asked) < 3:
                await asyncio.sleep(0.005)
            most = engine.running
            engine.pause.set()
            while not all(task.done() for task in asked):
                most = max(most, engine.running)
                await asyncio.sleep(0.005)
            statuses = [task.result()[0] for task in asked]
    assert most == 2
    assert sorted(statuses) == [200] * 5 + [429] * 3
