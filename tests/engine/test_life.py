"""The life of a request: the sequence of its states, and exactly one end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.core import EngineCore
from baton.engine.request import FOLLOWS, Request, RequestStatus
from baton.engine.request_times import RequestTimes
from baton.engine.sampling.sampling_state import SamplingState
from baton.sampling_params import SamplingParams
from baton.wire import FinishReason, LegTimings
from testkit.engines import pair, request, stepped

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def fresh() -> Request:
    return Request(request("r", [1, 2, 3], PARAMS), SamplingState(PARAMS, [1, 2, 3], 10, ()))


@pytest.mark.parametrize(
    "life",
    [
        "WAITING RUNNING FINISHED",
        "WAITING RUNNING WAITING RUNNING FINISHED",
        "WAITING RECEIVING RUNNING WAITING RUNNING FINISHED",
        "WAITING RECEIVING WAITING RUNNING FINISHED",
        "WAITING RUNNING AWAITING_RELEASE FINISHED",
        "WAITING WAITING FINISHED",
    ],
)
def test_lives_that_there_are(life: str) -> None:
    one = fresh()
    names = life.split()
    assert one.status is RequestStatus[names[0]]
    for _, name in pairwise(names):
        one.transition(RequestStatus[name])
    assert one.status is RequestStatus[names[-1]]


@pytest.mark.parametrize("status", list(RequestStatus))
@pytest.mark.parametrize("life", [[RequestStatus.FINISHED], [RequestStatus.RUNNING, RequestStatus.AWAITING_RELEASE]])
def test_nothing_follows_the_end_and_pages_that_are_held_are_computed_on_by_nobody(
    life: Any, status: RequestStatus
) -> None:
    assert set(FOLLOWS) == set(RequestStatus)
    one = fresh()
    for step in life:
        one.transition(step)
    if status not in FOLLOWS[life[-1]]:
        with pytest.raises(RuntimeError, match=f"cannot be {status.name} after {life[-1].name}"):
            one.transition(status)
        assert one.status is life[-1]


@pytest.mark.parametrize("first_token_ends", [False, True])
def test_every_request_ends_once_in_one_place(
    first_token_ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both legs of a handoff, one aborted in each state, and one whose prefill leg's client leaves after it was
    computed.
    """
    ended: list[tuple[EngineCore, str]] = []
    end = EngineCore._end

    def note(core: EngineCore, one: Request, reason: FinishReason | None, *how: Any, **more: Any) -> None:
        end(core, one, reason, *how, **more)
        assert one.status is RequestStatus.FINISHED
        assert one.request_id not in core.requests
        ended.append((core, one.request_id))

    monkeypatch.setattr(EngineCore, "_end", note)
    params = SamplingParams(max_tokens=1 if first_token_ends else 6, temperature=0.0, ignore_eos=True)
    with pair(tmp_path) as two:
        p, d = two.prefill.core, two.decode.core
        two.legs("whole", list(range(5, 40)), params, "push")
        two.settle()
        assert sorted(name for core, name in ended if core is p) == ["whole"]
        assert sorted(name for core, name in ended if core is d) == ["whole"]
        told, rest = two.legs("left", list(range(6, 40)), params, "push")
        two.step_until(lambda: bool(told.token_ids))
        p.abort("left")
        p.abort("left")
        two.settle()
        assert told.ended or not first_token_ends
        assert rest.ended
        two.legs("early", list(range(7, 40)), params, "pull")
        p.abort("early")
        d.abort("early")
        two.settle()
        assert sorted(name for core, name in ended if core is p) == ["early", "left", "whole"]
        assert sorted(name for core, name in ended if core is d) == ["early", "left", "whole"]
        assert not p.requests
        assert not d.requests
    with stepped() as one:
        one.add(request("a", [1, 2, 3], PARAMS))
        one.add(request("b", [1, 2, 4], PARAMS))
        one.step()
        one.core.abort("a")
        while one.core.requests:
            one.step()
        assert sorted(name for core, name in ended if core is one.core) == ["a", "b"]


def test_a_request_tells_its_times_once_and_only_if_asked() -> None:
    timed = RequestTimes(msgspec.structs.replace(request("r", [1, 2, 3], PARAMS), timings=True))
    timed.queued_at = 10.0
    timed.mark("announced", 10.5)
    timed.mark("announced", 11.0)  # the first time counts
    timed.num_bytes = 64
    assert timed.leg_timings(12.0) == LegTimings(announced=0.5, num_bytes=64)
    assert timed.leg_timings(13.0) is None
    untimed = RequestTimes(request("r", [1, 2, 3], PARAMS))
    untimed.mark("announced", 10.5)
    assert untimed.leg_timings(12.0) is None
