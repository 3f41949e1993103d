"""The load that processes of one router share."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass

from baton.router.admission.concurrency import ConcurrencyLimit
from baton.router.workers.loads import MAX_ENGINES, NO_LOAD, LoadTable, OtherLoad, WorkerLoads


@dataclass
class Engine:
    url: str
    num_inflight: int = 0
    queued_tokens: int = 0
    kv_tokens: int = 0
    others: OtherLoad = NO_LOAD


class Clock:
    """A second passes with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def workers(num: int, max_engines: int = MAX_ENGINES) -> tuple[LoadTable, list[WorkerLoads]]:
    table = LoadTable(num)
    return table, [WorkerLoads(table, number, Clock(), max_engines) for number in range(num)]


def test_each_process_sees_what_all_others_have_given_to_an_engine() -> None:
    _, (first, second, third) = workers(3)
    first.publish(Engine("http://a", 1, 100, 1000))
    second.publish(Engine("http://b", 9, 9, 9))
    second.publish(Engine("http://a", 2, 200, 2000))
    seen = [Engine("http://a"), Engine("http://b"), Engine("http://c")]
    third.read(seen)
    assert [engine.others for engine in seen] == [OtherLoad(3, 300, 3000), OtherLoad(9, 9, 9), NO_LOAD]
    second.read(seen)
    assert [engine.others for engine in seen] == [OtherLoad(1, 100, 1000), NO_LOAD, NO_LOAD]


def test_a_process_that_ended_has_no_load() -> None:
    table, (first, second) = workers(2)
    first.run(5)
    first.publish(Engine("http://a", 1, 100, 1000))
    assert second.num_running_elsewhere == 5
    table.clear(0)
    seen = Engine("http://a")
    second.read([seen])
    assert (seen.others, second.num_running_elsewhere) == (NO_LOAD, 0)


def test_engines_that_are_gone_make_room_for_others() -> None:
    _, (first, second) = workers(2, max_engines=2)
    first.publish(Engine("http://a", 1))
    first.publish(Engine("http://b", 0))
    first.publish(Engine("http://c", 3))
    first.publish(Engine("http://d", 4))  # no room
    seen = [Engine(f"http://{name}") for name in "abcd"]
    second.read(seen)
    assert [engine.others.num_inflight for engine in seen] == [1, 0, 3, 0]


def test_forks_share_the_table() -> None:
    _, (first, second) = workers(2)
    pid = os.fork()
    if not pid:
        first.publish(Engine("http://a", 7))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    seen = Engine("http://a")
    second.read([seen])
    assert seen.others.num_inflight == 7


async def test_requests_of_all_processes_count_for_admission() -> None:
    _, (first, second) = workers(2)
    mine, theirs = ConcurrencyLimit(lambda: 2, loads=first), ConcurrencyLimit(lambda: 2, loads=second)
    async with theirs.slot(), mine.slot():
        assert (first.num_running_elsewhere, second.num_running_elsewhere) == (1, 1)
        waiting = mine.slot()
        entered = asyncio.ensure_future(waiting.__aenter__())
        await asyncio.sleep(0)
        assert not entered.done()
    await entered
    await waiting.__aexit__(None, None, None)
    assert second.num_running_elsewhere == 0
