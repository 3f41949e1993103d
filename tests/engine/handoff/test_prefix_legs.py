"""Cached KV goes from one engine into another's prefix cache: the next turn of a conversation computes only what is
new, with the tokens and the acceptance of one engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.drafters.registry import DRAFTERS
from baton.engine.config import KVTransferConfig
from baton.errors import ForbiddenError, RequestError
from baton.handoff.protocol.ticket import prefix_digest
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, HandoffParams, TokenChunk
from benchmarks.parity.trial import Trial as Parity
from testkit.checkpoints import kinds
from testkit.checkpoints.granite import make_granite
from testkit.engines import Mode, Moved, Pair, Stepped, Stream, pair, random_prompt, request, stepped
from tests.engine.models.test_every_kind import GREEDY, SIZES, Trial, prompt_of

SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
MODES: tuple[Mode, Mode] = ("push", "pull")


def turn(two: Pair, name: str, prompt: list[int], params: SamplingParams, mode: Mode) -> Stream:
    told, rest = two.legs(name, prompt, params, mode)
    two.step_until(lambda: told.ended and rest.ended)
    return rest


def run(engine: Stepped, wire: GenerateRequest) -> Stream:
    stream = engine.add(wire)
    while not stream.ended:
        engine.step()
    return stream


def moved(two: Pair, name: str, prompt: list[int], mode: Mode, **more: Any) -> Moved:
    """A prefix that has gone from D to P, or has failed to."""
    found = two.hand_back(name, prompt, mode, **more)
    destination = found.destination
    assert destination is not None, found.source.error
    two.step_until(lambda: found.source.ended and destination.ended)
    return found


def test_a_second_turn_computes_only_what_is_new_at_every_slot_of_a_page(tmp_path: Path) -> None:
    with stepped() as single, pair(tmp_path) as two:
        for length in range(40, 56):
            mode, name, first = MODES[length % 2], str(length), prompt_of(length, salt=length)
            whole, rest = single.run(name, first, SHORT), turn(two, name, first, SHORT, mode)
            assert rest.result == whole.result
            second = first + whole.token_ids + prompt_of(9, salt=length)
            assert moved(two, f"{name}back", second, mode).num_tokens in (32, 48)
            whole, rest = single.run(f"{name}+", second, SHORT), turn(two, f"{name}+", second, SHORT, mode)
            assert (rest.result, rest.accepted) == (whole.result, whole.accepted)
            # The drafter's KV came too, or its group would hit nothing.
            assert two.prefill.streams[f"{name}+"].num_cached == whole.num_cached > 0
        two.settle()
        assert two.prefill.core.metrics.num_received_prefixes == 16
        assert not two.prefill.core.metrics.handoff_failures + two.decode.core.metrics.handoff_failures


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(*kinds.REGISTERED)
        patch.setitem(DRAFTERS, "guesses", "testkit.checkpoints.kinds:Guesses")
        yield Trial(tmp_path_factory.mktemp("every_kind"))


@pytest.mark.parametrize("drafter", ["guesses", "eagle"])
def test_latents_windows_and_states_at_checkpoints_come_too(trial: Trial, drafter: str | None, tmp_path: Path) -> None:
    """Between pages of other sizes. D has computed the first turn alone: of a window it keeps the end of a handoff."""
    others, sizes = "6,sliding_window=4,draft=10", SIZES
    if drafter != "eagle":
        others, sizes = others.rpartition(",")[0], sizes.rpartition(",")[0]
    settings = trial.settings(drafter, integrity="full", block_size=others, mamba_block_size=60)
    firsts = [prompt_of(length, salt=length) for length in (46, 59, 61, 75)]
    answers = trial.expect(firsts)
    seconds = [first + answer + prompt_of(11) for first, answer in zip(firsts, answers, strict=True)]
    expected = trial.expect(seconds)
    with stepped(**settings) as single, pair(tmp_path, {"block_size": sizes}, **settings) as two:
        for number, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            mode = MODES[number % 2]
            two.decode.run(f"r{number}", first, GREEDY)
            single.run(f"r{number}", first, GREEDY)
            found = two.hand_back(f"b{number}", second, mode)
            two.settle()
            rest = turn(two, f"s{number}", second, GREEDY, mode)
            alone = single.run(f"s{number}", second, GREEDY)
            assert rest.token_ids == alone.token_ids == expected[number]
            assert rest.accepted == alone.accepted
            assert two.prefill.streams[f"s{number}"].num_cached == alone.num_cached == found.num_tokens
            whole = two.decode.core.cache.whole_pages
            assert found.num_tokens == (len(second) - 12) // whole * whole, "the last of the answer is not computed"
        two.settle()


@pytest.mark.parametrize(("interval", "size"), [(48, 16), (256, 16), (48, 4)])
def test_a_state_goes_back_that_was_saved_in_an_answer(interval: int, size: int, tmp_path: Path) -> None:
    """D has the first turn by handoff, so the only checkpoint that it can have is one within its answer: at a multiple
    of the interval, or at the last whole pages. P's have 16 tokens, and so it is the former if D's are smaller."""
    settings: dict[str, Any] = {
        "model": str(make_granite(tmp_path / "target")),
        "speculative_config": None,
        "skip_tokenizer_init": True,
        "mamba_block_size": interval,
    }
    with stepped(**settings) as single, pair(tmp_path, {"block_size": size}, **settings) as two:
        for length in (40, 46, 47):
            mode, name, first = MODES[length % 2], str(length), prompt_of(length, salt=length)
            whole, rest = single.run(name, first, GREEDY), turn(two, name, first, GREEDY, mode)
            assert rest.token_ids == whole.token_ids
            second = first + whole.token_ids + prompt_of(9, salt=length)
            assert moved(two, f"{name}back", second, mode).num_tokens == 48
            whole, rest = single.run(f"{name}+", second, GREEDY), turn(two, f"{name}+", second, GREEDY, mode)
            assert rest.token_ids == whole.token_ids
            assert two.prefill.streams[f"{name}+"].num_cached == whole.num_cached == 48
        two.settle()


@pytest.mark.parametrize(
    ("target", "drafter", "sizes"),
    [("qwen3, full and window", "eagle3", "7"), ("mistral, window", "eagle", "16"), ("gpt_oss", "none", "5")],
)
def test_a_window_goes_back_that_came_by_a_handoff(target: str, drafter: str, sizes: str, tmp_path: Path) -> None:
    """D has the end of the first prompt's windows alone, and those of its answer."""
    settings = Parity(target, drafter, tmp_path, 3).settings
    answered = SamplingParams(max_tokens=44, temperature=0.0, ignore_eos=True)
    with stepped(**settings) as single, pair(tmp_path, {"block_size": sizes}, **settings) as two:
        for length in range(30, 47, 3):
            mode, name, first = MODES[length % 2], str(length), prompt_of(length, salt=length)
            whole, rest = single.run(name, first, answered), turn(two, name, first, answered, mode)
            assert rest.token_ids == whole.token_ids
            second = first + whole.token_ids + prompt_of(9, salt=length)
            found = moved(two, f"{name}back", second, mode)
            assert found.num_tokens > length + 43 - int(sizes)
            assert found.destination is not None
            assert found.destination.num_cached > found.num_tokens - 16
            whole, rest = single.run(f"{name}+", second, GREEDY), turn(two, f"{name}+", second, GREEDY, mode)
            assert (rest.token_ids, rest.accepted) == (whole.token_ids, whole.accepted)
            assert two.prefill.streams[f"{name}+"].num_cached == found.destination.num_cached
        two.settle()


@pytest.mark.parametrize("busy", [False, True])
def test_the_destination_says_how_long_other_requests_delayed_a_prefix(busy: bool, tmp_path: Path) -> None:
    with pair(tmp_path) as two:
        first = random_prompt(40)
        second = first + turn(two, "first", first, SHORT, "push").token_ids + random_prompt(9)
        core, told = two.prefill.core, list[TokenChunk]()
        emit = core.emit
        core.emit = lambda chunk, last: (told.append(chunk), emit(chunk, last))[1]
        other = two.prefill.add(request("other", random_prompt(30), SHORT)) if busy else None
        assert moved(two, "back", second, "push").num_tokens > 0
        (queued_s,) = (chunk.queued_s for chunk in told if chunk.request_id.startswith("back"))
        assert queued_s is not None
        assert (queued_s > 0.0) == busy
        if other is not None:
            two.step_until(lambda: other.ended)
        two.settle()


def test_tenants_with_other_salts_share_nothing(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    with pair(tmp_path) as two:
        wire = msgspec.structs.replace(request("r", prompt, SHORT), cache_salt="a")
        run(two.decode, wire)
        for salt in (None, "b"):
            found = two.hand_back(f"of {salt}", prompt, "push", salt)
            assert (found.source.error or "").startswith("prefix_missing")
        assert moved(two, "of a", prompt, "push", salt="a").num_tokens == 32
        for salt, held in ((None, 0), ("b", 0), ("a", 32)):
            wire = msgspec.structs.replace(request(f"{salt}", prompt, SHORT), cache_salt=salt)
            assert run(two.prefill, wire).num_cached == held
        two.settle()


def test_a_ticket_is_for_one_salt_and_for_no_request(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    with pair(tmp_path) as two:
        signed = two.signed(prefix_digest(prompt, "a"), "push", back=True)
        for prefix_len, salt in ((20, None), (20, "b"), (None, "a")):
            params = HandoffParams(role="prefill", ticket=signed, prefix_len=prefix_len)
            wire = msgspec.structs.replace(request("r", prompt, SHORT, handoff=params), cache_salt=salt)
            with pytest.raises(ForbiddenError, match="another request"):
                two.decode.add(wire)
        with pytest.raises(RequestError, match="prefix_len"):
            two.decode.add(request("r", prompt, SHORT, handoff=msgspec.structs.replace(params, prefix_len=40)))


def test_an_engine_says_what_it_holds_and_declines_if_that_is_too_little(tmp_path: Path) -> None:
    prompt = prompt_of(60)
    with pair(tmp_path) as two:
        two.decode.run("r", prompt, SHORT)
        some = moved(two, "at most 40", prompt, "pull", most=40)
        assert (some.num_tokens, two.prefill.streams["at most 40"].num_cached) == (40, 32), "whole pages are taken"
        every = moved(two, "all", prompt, "push")
        assert (every.num_tokens, two.prefill.streams["all"].num_cached) == (59, 48)
        other = prompt[:20] + prompt_of(40, salt=1)
        found = two.hand_back("most is missing", other, "push", most_missing=20)
        assert found.destination is None
        assert (found.source.error or "").startswith("prefix_missing")
        assert found.source.recoverable
        two.settle()


@pytest.mark.parametrize(("who", "mode"), [("source", "push"), ("destination", "pull")])
def test_a_leg_that_is_given_up_leaves_no_page_behind(who: str, mode: Mode, tmp_path: Path) -> None:
    """Before a step, after the session, and while bytes move."""
    prompt = prompt_of(200)
    with pair(tmp_path) as two:
        two.decode.run("r", prompt, SHORT)
        for num_steps in range(4):
            name = f"b{num_steps}"
            found = two.hand_back(name, prompt, mode)
            assert found.destination is not None
            for _ in range(num_steps):
                two.prefill.step()
            (two.decode if who == "source" else two.prefill).core.abort(name)
            two.settle()
            assert (found.destination if who == "source" else found.source).ended
        moved(two, "last", prompt, mode)
        assert two.prefill.streams["last"].num_cached == 192


@pytest.mark.parametrize(("fault", "mode"), [("corrupt", "push"), ("fail", "pull")])
def test_bytes_that_are_not_proven_enter_no_prefix_cache(fault: str, mode: Mode, tmp_path: Path) -> None:
    prompt, transfer = prompt_of(100), KVTransferConfig(kv_transport=f"faulty+local://?fault={fault}")
    with stepped() as single, pair(tmp_path, integrity="full", kv_transfer_config=transfer) as two:
        two.decode.run("r", prompt, SHORT)
        found = moved(two, "back", prompt, mode)
        assert found.destination is not None
        assert found.destination.finish_reason == "error"
        two.settle()
        alone, whole = two.prefill.run("again", prompt, SHORT), single.run("r", prompt, SHORT)
        assert alone.num_cached == (64 if fault == "corrupt" else 0), "some pieces had the right bytes"
        assert (alone.token_ids, alone.accepted) == (whole.token_ids, whole.accepted)
