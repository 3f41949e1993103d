"""Plain tokens that take the short cut, and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import pytest

from baton.event_loop import timeout
from baton.openai.streams import ChoiceSequence
from testkit.clients.reader import Reader
from testkit.servers.fake_serving import until
from testkit.servers.fleets import Cluster, Gate, Setup, expected_answer
from tests.openai.http.test_slow_readers import LIMIT_S, fronts

BODY = {"prompt": "a", "max_tokens": 30, "seed": 3, "stream": True}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """The positions of tokens that took the short cut."""
    found: list[int] = []

    def profile(frame: FrameType, event: str, value: object) -> None:
        if event == "return" and frame.f_code is ChoiceSequence.take.__code__ and value is True:
            found.append(frame.f_locals["chunk"].position)

    sys.setprofile(profile)
    yield found
    sys.setprofile(None)


async def streamed(session: aiohttp.ClientSession, url: str, gate: Gate, num: int = 1, **body: Any) -> list[Any]:
    """`num`: as of `Gate.open`, after the first event."""
    async with session.post(f"{url}/v1/completions", json={**BODY, **body}) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readuntil(b"\n\n")
        await gate.open(session, url, num)
        lines = (first + await response.read()).split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


async def test_plain_tokens_take_it(directory: Path, taken: list[int], gate: Gate) -> None:
    setup = Setup(directory)
    setup.decode.pause = gate
    async with setup.run() as (url, session):
        events = await streamed(session, url, gate, stream_options={"include_usage": True})
        expected = await expected_answer(directory, session)
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
    assert text_of(events) == expected["choices"][0]["text"]
    assert events[-1]["usage"] == expected["usage"]
    assert len(taken) >= 5
    assert taken == sorted(set(taken))
    assert "baton:front_output_tokens_total 30.0" in metrics
    assert 'baton:router_requests_by_stage{stage="decode"} 0.0' in metrics


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"logprobs": 1}, {"return_token_ids": True}],
    ids=["choices", "logprobs", "ids"],
)
async def test_other_streams_do_not(directory: Path, taken: list[int], gate: Gate, body: dict[str, Any]) -> None:
    setup = Setup(directory)
    setup.decode.pause = gate
    async with setup.run() as (url, session):
        events = await streamed(session, url, gate, **body)
    assert len({choice["index"] for event in events for choice in event["choices"]}) == body.get("n", 1)
    assert len(text_of(events)) >= 25 * body.get("n", 1)
    assert taken == []


@pytest.mark.parametrize("fail", ["lost", "thread died", "reports"])
@pytest.mark.parametrize("fail_after", [1, 8, 20])
async def test_a_lost_engine_costs_no_token(
    directory: Path, taken: list[int], gate: Gate, fail: str, fail_after: int
) -> None:
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.pause = gate
    cluster.decodes[0].fail, cluster.decodes[0].fail_after = fail, fail_after
    async with cluster.run() as (url, session):
        events = await streamed(session, url, gate)
        expected = await expected_answer(directory, session)
    assert text_of(events) == expected["choices"][0]["text"]
    assert taken


async def test_an_error_ends_the_stream(directory: Path, taken: list[int], gate: Gate) -> None:
    setup = Setup(directory)
    setup.decode.pause, setup.decode.fail, setup.decode.fail_after = gate, "mid-stream", 15
    async with setup.run() as (url, session):
        events = await streamed(session, url, gate)
        expected = await expected_answer(directory, session)
    assert "error" in events[-1]
    sent = text_of(events)
    assert len(sent) >= 14
    assert expected["choices"][0]["text"].startswith(sent)
    assert taken


async def test_a_client_that_leaves_ends_its_legs(directory: Path, taken: list[int], gate: Gate) -> None:
    setup = Setup(directory)
    setup.decode.pause = gate
    setup.decode.step_s = 0.002  # the answer must last until the client has left
    async with setup.run() as (url, session):
        async with session.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 200}) as response:
            await response.content.readuntil(b"\n\n")
            await gate.open(session, url)
            await until(lambda: taken)
            response.close()
        await until(lambda: setup.decode.outcomes["aborted"] == 1)
        assert setup.decode.running == setup.prefill.running == 0


@pytest.mark.parametrize(
    "limits", [{"write_s": 0.3}, {"write_s": 3600.0, "stream_bytes": 20_000}], ids=["time", "size"]
)
async def test_a_client_that_does_not_read_is_cut_off(
    directory: Path, readers: Callable[..., Reader], taken: list[int], limits: dict[str, Any]
) -> None:
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with fronts(directory, "pair", **limits) as (url, engines):
        engines[-1].step_s = 0.001
        reader = readers(url, "/v1/completions", body)
        await until(lambda: engines[-1].outcomes["aborted"] == 1)
        async with timeout(LIMIT_S):
            await reader.until_cut()
    assert taken


@pytest.mark.parametrize("fail", [None, "lost"])
async def test_a_stop_string_ends_the_stream(directory: Path, taken: list[int], gate: Gate, fail: str | None) -> None:
    """Also if the engine is lost that has sent it."""
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.pause = gate
    cluster.decodes[0].fail, cluster.decodes[0].fail_after = fail, 15
    async with cluster.run() as (url, session):
        events = await streamed(session, url, gate, stop=["brown", "never comes"])
    assert text_of(events) == "The quick "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == "brown"
    assert taken


async def test_streams_side_by_side_are_equal(directory: Path, taken: list[int], gate: Gate) -> None:
    setup = Setup(directory)
    setup.decode.pause = gate
    async with setup.run() as (url, session):
        texts = await asyncio.gather(*(streamed(session, url, gate, 8, max_tokens=60) for _ in range(8)))
    assert len({text_of(events) for events in texts}) == 1
    assert len(taken) > 8
