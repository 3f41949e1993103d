"""Advice on the numbers of prefill and decode engines, from replays of measured requests."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from baton.router.status.advice import MIN_REQUESTS, Advice, Fleet, ServedRequest, advise, replay
from testkit.servers.fake_serving import status_of
from testkit.servers.fleets import Cluster, complete


def served(number: int, every: float, prefill: float, queued: float | None = 0.0, decode: float = 1.0) -> ServedRequest:
    """The `number`th request, one `every` so many seconds."""
    whole = prefill + (queued or 0.0)
    return ServedRequest(number * every, number * every + whole, whole, queued, decode, 1000)


def advice(requests: list[ServedRequest], fleet: Fleet) -> Advice:
    found = advise(requests, fleet)
    assert found is not None
    return found


def test_a_replay_waits_for_engines_and_slots() -> None:
    # All arrive at once. One engine prefills them in turn.
    work = [(0.0, 1.0, 10.0)] * 10
    assert replay(work, Fleet(1, 1)) == 10.0
    assert replay(work, Fleet(2, 1)) == 5.0
    # Two slots: the next two begin when the first two have ended.
    assert replay(work[:4], Fleet(4, 1, 2)) == 12.0
    assert replay(work[:4], Fleet(4, 2, 2)) == 1.0


def test_a_queue_of_prompts_asks_for_a_prefill_engine() -> None:
    found = advice([served(number, 0.9, 1.0, 0.1 * number) for number in range(100)], Fleet(1, 1))
    assert found.changes["one more prefill engine"] == pytest.approx(1.0)
    assert found.text == "one more prefill engine would cut TTFT p90 by 90%, from 10000 to 1000 ms"


def test_a_queue_for_slots_asks_for_a_decode_engine() -> None:
    found = advice([served(number, 1.0, 0.1, decode=2.5) for number in range(100)], Fleet(2, 1, 2))
    assert found.changes["one more prefill engine"] == pytest.approx(found.ttft_s)
    assert found.text == "one more decode engine would cut TTFT p90 by 100%, from 27100 to 100 ms"


def test_an_engine_too_many_in_one_role_is_offered_to_the_other() -> None:
    found = advice([served(number, 0.9, 1.0, 0.1 * number) for number in range(100)], Fleet(1, 3, 2))
    assert found.changes["a decode engine as a prefill engine"] == pytest.approx(1.0)
    assert "a prefill engine as a decode engine" not in found.changes


@pytest.mark.parametrize(("engines", "together", "ttft"), [(1, 1, 0.5), (1, 8, 4.0), (2, 8, 4.0)])
def test_prompts_that_are_computed_together_share_the_time(engines: int, together: int, ttft: float) -> None:
    """Batches of `together` prompts, each batch done when its last is: no fleet was ever slower than it was."""
    batches = [served(number // together, 8.0, ttft) for number in range(96)]
    assert advice(batches, Fleet(engines, 1)).ttft_s == pytest.approx(ttft)


def test_nothing_to_change_is_said() -> None:
    found = advice([served(number, 2.0, 1.0) for number in range(100)], Fleet(1, 1, 8))
    assert "in balance" in found.text


def test_engines_that_do_not_tell_their_queue_are_measured_by_their_quickest_prompts() -> None:
    told = [served(number, 0.9, 1.0, queued=0.1 * number) for number in range(100)]
    untold = [dataclasses.replace(one, queued=None) for one in told]
    # The tenth percentile waited for a second.
    work = [(one.arrived, min(one.prefill, 2.0), one.decode) for one in told]
    assert advice(untold, Fleet(1, 1)).ttft_s == replay(work, Fleet(1, 1))


def test_few_requests_are_no_ground_for_advice() -> None:
    many = [served(number, 0.9, 1.0) for number in range(MIN_REQUESTS)]
    assert advise(many[1:], Fleet(1, 1)) is None
    assert advise(many, Fleet(0, 1)) is None
    assert advise(many, Fleet(1, 1)) is not None


async def test_status_has_advice_from_measured_requests(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    async with cluster.run() as (url, session):
        assert (await status_of(session, url))["advice"] is None
        for _ in range(5):
            answers = await asyncio.gather(*(complete(session, url, max_tokens=2) for _ in range(10)))
            assert {status for status, _ in answers} == {200}
        told = (await status_of(session, url))["advice"]
    assert told["num_requests"] == 50
    assert set(told["with"]) == {"one more prefill engine", "one more decode engine"}
    assert told["replayed_ttft_p90_ms"] >= told["with"]["one more prefill engine"] > 0.0
