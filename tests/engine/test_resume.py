"""A request that resumes from known tokens continues as if it had never stopped: on one engine, and through a
handoff.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.engine.request_checks import make_request
from baton.errors import RequestError
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import make_cases
from testkit.engines import TARGET, Mode, Pair, Stepped, Stream, pair, request, stepped

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PENALISED = SamplingParams(
    max_tokens=24,
    temperature=0.8,
    seed=5,
    sample_index=2,
    logprobs=2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    min_tokens=10,
    logit_bias={7: 2.0},
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    cases = make_cases(Tokenizer.load(TARGET), [1, 31, 70], SamplingParams())
    return [list(case.prompt_token_ids) for case in cases]


@pytest.fixture(scope="module")
def single() -> Iterator[Stepped]:
    with stepped() as one:
        yield one


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("keys")) as two:
        yield two


def round_ends(stream: Stream) -> list[int]:
    """The number of tokens after the first one, and after each verification round."""
    ends = [1]
    for accepted in stream.accepted:
        ends.append(ends[-1] + accepted + 1)
    return [end for end in ends if end < len(stream.token_ids)]


def assert_continues(whole: Stream, rest: Stream, cut: int, where: object) -> None:
    assert rest.token_ids == whole.token_ids[cut:], where
    assert rest.positions == list(range(cut, len(whole.token_ids))), where
    assert rest.logprobs == whole.logprobs[cut:], where
    assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason), where
    if cut in round_ends(whole):
        before = round_ends(whole).index(cut)
        assert rest.accepted == whole.accepted[before:], where


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_one_engine_resumes_at_any_token(single: Stepped, prompts: list[list[int]], params: SamplingParams) -> None:
    for number, prompt in enumerate(prompts):
        whole = single.run(f"whole-{number}-{params.seed}", prompt, params)
        assert sum(whole.accepted) > 0
        for cut in {*range(1, len(whole.token_ids), 6), *round_ends(whole)}:
            name = f"rest-{number}-{cut}-{params.seed}"
            rest = single.run(name, prompt, params, known=whole.token_ids[:cut])
            assert_continues(whole, rest, cut, (number, cut))
    assert single.is_idle()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_a_handoff_resumes_at_any_token(
    single: Stepped, both: Pair, prompts: list[list[int]], params: SamplingParams, mode: Mode
) -> None:
    for number, prompt in enumerate(prompts):
        whole = single.run(f"{mode}-{number}-{params.seed}", prompt, params)
        for cut in sorted({1, 2, 9, len(whole.token_ids) - 1, *round_ends(whole)[:4]}):
            name = f"{mode}-{number}-{cut}-{params.seed}"
            told, rest = both.legs(name, prompt, params, mode, known=whole.token_ids[:cut])
            both.step_until(lambda told=told, rest=rest: told.ended and rest.ended)  # type: ignore[misc]
            assert told.token_ids == [], "the prefill leg samples nothing anew"
            assert_continues(whole, rest, cut, (number, cut))
            both.settle()
    assert both.decode.core.metrics.num_handoffs["committed"] > 0
    assert not both.decode.core.metrics.recoveries


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_decode_leg_repeats_the_first_token(both: Pair, prompts: list[list[int]], mode: Mode) -> None:
    params = msgspec.structs.replace(PENALISED, max_tokens=10)
    told, rest = both.legs(f"first-{mode}", prompts[1], params, mode)
    both.step_until(lambda: told.ended and rest.ended)
    assert (told.positions, rest.positions) == ([0], list(range(10)))
    assert told.token_ids == rest.token_ids[:1]
    assert told.logprobs == rest.logprobs[:1]
    both.settle()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_first_token_that_ends_the_request_comes_from_both_legs(
    single: Stepped, both: Pair, prompts: list[list[int]], mode: Mode
) -> None:
    first = single.run(f"ends-{mode}", prompts[2], GREEDY).token_ids[0]
    params = msgspec.structs.replace(GREEDY, stop_token_ids=(first,))
    told, rest = both.legs(f"ends-{mode}", prompts[2], params, mode)
    both.step_until(lambda: told.ended and rest.ended)
    assert told.result == rest.result == ([first], "stop", first, [])
    both.settle()


def test_stop_token_and_limit_count_from_the_prompt(single: Stepped, prompts: list[list[int]]) -> None:
    whole = single.run("stop-whole", prompts[1], GREEDY)
    stop = whole.token_ids[12]
    params = msgspec.structs.replace(GREEDY, stop_token_ids=(stop,))
    ended = single.run("stop-ended", prompts[1], params)
    for cut in range(1, len(ended.token_ids)):
        assert_continues(ended, single.run(f"stop-{cut}", prompts[1], params, known=ended.token_ids[:cut]), cut, cut)


@pytest.mark.parametrize("known", [[5] * 24, [5] * 30])
def test_known_tokens_must_leave_something_to_do(single: Stepped, prompts: list[list[int]], known: Any) -> None:
    with pytest.raises(RequestError, match="nothing to generate"):
        make_request(single.engine, request("full", prompts[0], GREEDY, known))
