"""Drafter rows that wait until their request has ended or is preempted: the next turn of a chat finds as much in the
prefix cache, and its drafts are accepted, as if every row had been computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.request import Request
from baton.engine.speculation.adaptive import AdaptiveDrafts
from baton.wire import SamplingParams
from testkit.engines import EAGLE3, Mode, Stepped, Stream, pair, random_prompt, request, stepped
from testkit.inside import kept_features
from tests.engine.speculation.test_adaptive import auto

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {"speculative_config": auto(EAGLE3), "kv_cache_memory": 8 << 20, "block_size": 8}
PROMPT = random_prompt(19)
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class Chosen(AdaptiveDrafts):
    """All requests get `count` drafts, and keep them."""

    count = 0

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> np.ndarray:
        return np.clip(np.array(most), 0, self.count)

    def holds_none(self, requests: list[Request]) -> bool:
        return self.count == 0


def chosen(one: Stepped) -> Chosen:
    one.core.steps.adaptive = counts = Chosen(8)
    return counts


def at_once(one: Stepped) -> Chosen:
    one.core.steps.deferred = one.core.late = None
    return chosen(one)


def undrafted(one: Stepped, name: str = "first") -> Stream:
    counts = chosen(one)
    stream = one.run(name, PROMPT, PARAMS)
    counts.count = 3
    return stream


def next_turn(one: Stepped, answer: list[int], name: str = "next") -> tuple[list[int], list[int], int]:
    stream = one.run(name, PROMPT + answer + random_prompt(5), PARAMS)
    return stream.token_ids, stream.accepted, stream.num_cached


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], tuple[list[int], list[int], int]]:
    with stepped(**SETTINGS) as one:
        counts = at_once(one)
        answer = one.run("first", PROMPT, PARAMS).token_ids
        counts.count = 3
        wanted = next_turn(one, answer)
        assert sum(wanted[1]) > 0
        assert wanted[2] > len(PROMPT) + 30
        return answer, wanted


@pytest.mark.parametrize("idle", [False, True])
def test_the_next_turn_continues_the_answer(
    idle: bool, expected: tuple[list[int], tuple[list[int], list[int], int]]
) -> None:
    with stepped(**SETTINGS) as one:
        assert undrafted(one).token_ids == expected[0]
        assert not one.is_idle()
        assert len(kept_features(one)) > 30
        if idle:
            assert one.step()
            assert not one.step()
            assert one.is_idle()
        assert next_turn(one, expected[0]) == expected[1]
        while one.step():
            pass
        assert one.is_idle()


def after_a_preemption(defers: bool, expected: list[int]) -> tuple[list[int], int]:
    """Accepted drafts, and the tokens that were missing."""
    with stepped(**SETTINGS) as one:
        counts = chosen(one) if defers else at_once(one)
        stream = one.add(request("first", PROMPT, PARAMS))
        while len(stream.token_ids) < 25:
            one.step()
        (running,) = one.core.scheduler.running
        assert (running.num_drafted < running.num_computed) is defers
        one.core.scheduler.preempt(running)
        missing = one.core.scheduler.num_missing(running)
        counts.count = 3
        while not stream.ended:
            one.step()
        assert stream.token_ids == expected
        return stream.accepted, missing


def test_a_request_continues_after_a_preemption(expected: tuple[list[int], Any]) -> None:
    late = after_a_preemption(True, expected[0])
    assert late == after_a_preemption(False, expected[0])
    assert sum(late[0]) > 0


def test_an_aborted_request_frees_its_pages_at_once() -> None:
    with stepped(**SETTINGS) as one:
        chosen(one)
        stream = one.add(request("first", PROMPT, PARAMS))
        while len(stream.token_ids) < 25:
            one.step()
        one.core.abort("first")
        assert one.is_idle()
        one.run("next", [3], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(kept_features(one)) <= 3


def test_failed_rows_enter_no_prefix_cache(expected: tuple[list[int], tuple[list[int], list[int], int]]) -> None:
    with stepped(**SETTINGS) as one:
        undrafted(one)
        draft = one.core.steps.executor.draft

        def fail(plan: Any) -> Any:
            raise RuntimeError("no memory")

        one.core.steps.executor.draft = fail  # type: ignore[method-assign]
        assert one.step()
        assert one.is_idle()
        one.core.steps.executor.draft = draft  # type: ignore[method-assign]
        tokens, accepted, num_cached = next_turn(one, expected[0])
        assert (tokens, accepted) == expected[1][:2]
        assert num_cached < len(PROMPT)


def test_rows_are_given_up_for_pages_unless_prompts_continue_answers() -> None:
    """The second request needs more than half of the pages."""
    with stepped(**{**SETTINGS, "kv_cache_memory": 1 << 20, "max_model_len": 256}) as one:
        counts = chosen(one)
        (pool, *_) = one.core.cache.pools.values()
        long = random_prompt(8 * (pool.num_pages // 2), 7)
        found = []
        for number in range(2):
            prompt = [number, *PROMPT]
            answer = one.run(f"{number}", prompt, PARAMS).token_ids
            one.run(f"{number} beside", [number, *long], PARAMS)
            assert all(kept.token_ids[1:20] != PROMPT for kept in one.core.steps.deferred.ended)  # type: ignore[union-attr]
            counts.count = 3 * number
            stream = one.run(f"{number} next", prompt + answer + [5], PARAMS)
            found.append(stream.num_cached > len(prompt))
            while one.step():
                pass
            assert one.is_idle()
        assert found == [False, True]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_prefix_is_handed_back_with_the_rows_that_waited(
    mode: Mode, tmp_path: Path, expected: tuple[list[int], tuple[list[int], list[int], int]]
) -> None:
    answer, (tokens, accepted, num_cached) = expected
    with pair(tmp_path, **SETTINGS) as both:
        counts = chosen(both.decode)
        _, rest = both.legs("first", PROMPT, PARAMS, mode)
        both.step_until(lambda: rest.ended)
        assert rest.token_ids == answer
        longer = PROMPT + answer + random_prompt(5)
        moved = both.hand_back("back", longer, mode)
        assert moved.num_tokens == num_cached
        both.step_until(lambda: moved.destination is None or moved.destination.ended)
        counts.count = 3
        _, rest = both.legs("next", longer, PARAMS, mode)
        both.settle()
        assert rest.token_ids == tokens
        assert rest.accepted == accepted
