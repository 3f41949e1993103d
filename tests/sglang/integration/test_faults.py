"""Servers that are killed or stopped under load, and damaged copies: every answer is exact or a named error, and the
servers that live have all their pages again.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testkit.sglang.servers import (
    Mode,
    Pair,
    check_whole,
    greedy,
    outcome,
    pair_configs,
    prompts,
    serve,
    session,
    ticket_key,
)

pytestmark = pytest.mark.timeout(1800)
NUM = 12
LENGTHS = [7, 33, 90, 200, 400, 700]
SETTINGS = {"integrity": "full", "lease": 3.0}
Outcome = list[int] | str


@pytest.fixture(scope="module")
def want() -> tuple[list[list[int]], list[list[int]]]:
    found = prompts(LENGTHS, seed=11)
    return found, greedy(found, NUM)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Path]]:
    folder = tmp_path_factory.mktemp("faults")
    with serve(folder, pair_configs(folder, settings=SETTINGS)) as (prefill, decode):
        yield Pair(prefill, decode, ticket_key(folder)), folder


async def load(
    pair: Pair, want: tuple[list[list[int]], list[list[int]]], fault: Callable[[int], Awaitable[None]], num: int = 24
) -> list[Outcome]:
    """`num` requests, six at once. `fault` is told how many have ended, each time that one has."""
    found, ended = want[0], 0
    turn, legs = asyncio.Semaphore(6), (pair.minter("pull"), pair.minter("push"))

    async def one(index: int) -> Outcome:
        nonlocal ended
        async with turn:
            answer = await outcome(http, pair, found[index % len(found)], NUM, legs[index % 2])
        ended += 1
        await fault(ended)
        return answer

    async with session() as http:
        return await asyncio.gather(*(one(index) for index in range(num)))


def check(answers: list[Outcome], want: tuple[list[list[int]], list[list[int]]]) -> tuple[int, list[str]]:
    """How many are exact, and the errors of the others."""
    errors = []
    for index, answer in enumerate(answers):
        if isinstance(answer, str):
            errors.append(answer)
        else:
            assert answer == want[1][index % len(want[1])], f"request {index}"
    return len(answers) - len(errors), errors


async def nothing(ended: int) -> None:
    pass


@pytest.mark.parametrize("stopped", ["decode", "prefill"])
def test_a_server_that_stops_fails_its_requests_by_name_and_serves_again(
    pair: tuple[Pair, Path], want: tuple[list[list[int]], list[list[int]]], stopped: str
) -> None:
    both, _ = pair
    server = both.decode if stopped == "decode" else both.prefill
    other = both.prefill if stopped == "decode" else both.decode

    async def stop(ended: int) -> None:
        if ended != 4:
            return
        server.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(10.0)  # three leases
        finally:
            server.signal(signal.SIGCONT)

    lost = other.counts()["lost_leases"]
    exact, errors = check(asyncio.run(load(both, want, stop)), want)
    assert exact >= 4
    assert other.counts()["lost_leases"] > lost, "the stop was not noticed"
    assert all("connection" not in error for error in errors), errors
    check_whole(both.prefill, both.decode)
    assert check(asyncio.run(load(both, want, nothing, 6)), want) == (6, [])


def test_killed_servers_leave_the_other_whole(
    pair: tuple[Pair, Path], want: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Field classes F and H: first D is killed, then P, whose D has begun anew. The last test of this pair."""
    both, folder = pair
    answers: dict[str, list[Outcome]] = {}

    def run(victims: Pair, name: str) -> None:
        server = victims.decode if name == "D" else victims.prefill

        async def kill(ended: int) -> None:
            if ended == 5:
                server.signal(signal.SIGKILL)

        answers[name] = asyncio.run(load(victims, want, kill))

    run(both, "D")
    exact, errors = check(answers["D"], want)
    assert exact >= 5
    assert errors
    check_whole(both.prefill)
    with serve(folder, pair_configs(folder, settings=SETTINGS)[1:]) as (second,):
        renewed = replace(both, decode=second)
        assert check(asyncio.run(load(renewed, want, nothing, 6)), want) == (6, [])
        run(renewed, "P")
        exact, errors = check(answers["P"], want)
        assert exact >= 5
        assert errors
        check_whole(second)


def test_damaged_copies_are_repaired_or_fail_by_name(
    tmp_path: Path, want: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Field class K. P's writes leave out the last page of one group, but never in three handoffs in a row, after which
    D gives a peer up; D's reads of another invert a byte, each time."""
    prefill, decode = pair_configs(tmp_path, settings={"integrity": "full", "lease": 20.0})
    assert prefill.settings is not None
    assert decode.settings is not None
    prefill.settings["kv_transport"] = "faulty+nixl://?fault=drop-last-page&region=0&every=3"
    decode.settings["kv_transport"] = "faulty+nixl://?fault=corrupt&region=1"

    async def run(both: Pair, mode: Mode) -> list[Outcome]:
        async with session() as http:
            return [await outcome(http, both, prompt, NUM, both.minter(mode)) for prompt in want[0]]

    with serve(tmp_path, [prefill, decode]) as servers:
        both = Pair(*servers, ticket_key(tmp_path))
        pushed = asyncio.run(run(both, "push"))
        assert check(pushed, want) == (len(LENGTHS), [])
        counts = both.decode.counts()
        assert counts["bad_pieces"] > 0
        assert counts["repairs"] > 0
        exact, errors = check(asyncio.run(run(both, "pull")), want)
        assert exact == 0
        named = ("do not match their digests", "unhealthy_peer")
        assert all(any(name in error for name in named) for error in errors), errors
        check_whole(both.prefill, both.decode)
        groups = re.findall(r"group ([\w.]+), layers \[[\d, ]+\], tokens \[\d+, \d+\)", both.decode.log.read_text())
        assert set(groups) == {"target.k.0", "target.k.1"}
