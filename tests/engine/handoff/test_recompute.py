"""A decode engine whose handoff fails continues alone: same tokens, no page lost, none freed too early."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baton.engine.request import Request
from baton.errors import WrongEngineError
from baton.handoff.agent.leg_events import DecodeLeg, DecodePages, GiveUp
from baton.handoff.protocol.events import DecodeAdmitted, DecodeFailed, DecodeFinished, DecodeProgress, DecodeReleased
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.openai.http.api_errors import to_api_error
from baton.sampling_params import SamplingParams
from baton.testing import RecordingAgent
from baton.text import Tokenizer
from baton.verify.observe import make_cases
from testkit.engines import TARGET, Mode, Pair, Stepped, Stream, kv_of, pair, stepped

PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=3, logprobs=1, presence_penalty=0.3)
EOS = 2
PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(make_cases(Tokenizer.load(TARGET), [100], SamplingParams())[0].prompt_token_ids)


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> Stream:
    with stepped() as one:
        return one.run("whole", prompt, PARAMS)


def silence(decode: Stepped) -> RecordingAgent:
    assert decode.core.legs is not None
    decode.core.legs.agent = agent = RecordingAgent()
    return agent


def waiting_leg(two: Pair, prompt: list[int], known: list[int] | None = None) -> tuple[Stream, AttemptKey]:
    """A decode leg that has its pages and waits for P."""
    _, stream = two.legs("r", prompt, PARAMS, "push", known)
    assert two.decode.core.legs is not None
    (key,) = two.decode.core.legs.open
    two.decode.step()
    assert two.decode.core.load().num_referenced_pages == 0, "P may have no room for it"
    two.decode.core.on_handoff(DecodeAdmitted(key))
    two.decode.step()
    return stream, key


def finish(decode: Stepped, stream: Stream) -> None:
    for _ in range(200):
        decode.step()
        if stream.ended:
            return
    raise AssertionError("it does not end")


def lost(key: AttemptKey, recoverable: bool = True) -> DecodeFailed:
    return DecodeFailed(key, "peer_lost", "gone", recoverable)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("known", [0, 1, 7])
def test_a_prefill_engine_that_leaves_costs_no_token(
    tmp_path: Path, prompt: list[int], expected: Stream, mode: Mode, known: int
) -> None:
    with pair(tmp_path, max_num_batched_tokens=32) as two:
        told, rest = two.legs("r", prompt, PARAMS, mode, expected.token_ids[:known] or None)
        two.prefill.step()  # one chunk of several
        two.decode_until(lambda: two.decode.core.load().num_referenced_pages > 0)
        assert two.prefill.engine.agent is not None
        two.await_session()
        two.prefill.engine.agent.close()
        two.step_until(lambda: rest.ended)
        assert told.token_ids == []
        assert rest.token_ids == expected.token_ids[known:]
        assert rest.logprobs == expected.logprobs[known:]
        assert rest.positions == list(range(known, len(expected.token_ids)))
        if known == 0:
            assert rest.accepted == expected.accepted
        two.step_until(two.decode.is_idle)
        rows = [row for row in two.decode.core.metrics.collect_rows() if row[0] == "baton:recoveries"]
        assert [(row[3], row[4]) for row in rows] == [({"rung": "recompute"}, 1.0)]


def test_old_pages_stay_out_of_use_until_they_are_quiet(tmp_path: Path, prompt: list[int], expected: Stream) -> None:
    with pair(tmp_path) as two:
        silence(two.decode)
        stream, key = waiting_leg(two, prompt)
        load = two.decode.core.load
        held = load().num_referenced_pages
        two.decode.core.on_handoff(lost(key))
        assert (load().num_referenced_pages, load().num_quarantined_pages) == (0, held)
        finish(two.decode, stream)
        assert stream.result == expected.result
        assert [chunk.handoff_error for chunk in stream.chunks if chunk.handoff_error] == ["peer_lost: gone"]
        assert load().num_quarantined_pages == held, "the peer may still write them"
        two.decode.core.on_handoff(DecodeReleased(key))
        assert two.decode.is_idle()


def test_proven_pages_shorten_the_recomputation(tmp_path: Path, prompt: list[int], expected: Stream) -> None:
    with pair(tmp_path) as two:
        silence(two.decode)
        legs, pools = two.decode.core.legs, two.decode.core.cache.pools
        # The bytes that P would have written: the prompt, computed here and moved into the attempt's pages.
        stream, key = waiting_leg(two, prompt)
        request = legs.open[key].request
        tables = {name: list(pages) for name, pages in request.kv.pages.items()}
        with stepped() as other:
            other.run("same", prompt, PARAMS)
            for name, pool in other.core.cache.pools.items():
                found = pool.lookup(prompt, 80)
                assert found.num_tokens == 80
                for source, destination in zip(found.pages, tables[name], strict=False):
                    kv_of(two.decode)[name][destination].copy_(kv_of(other)[name][source])
        two.decode.core.on_handoff(DecodeProgress(key, dict.fromkeys(pools, 48)))
        two.decode.core.on_handoff(DecodeProgress(key, {"draft": 70}))
        two.decode.core.on_handoff(lost(key))
        two.decode.core.on_handoff(DecodeReleased(key))
        finish(two.decode, stream)
        assert request.num_cached == 48 + 0, "three whole pages of 16 are proven in every group"
        assert stream.result == expected.result
        assert stream.accepted == expected.accepted
        assert two.decode.is_idle()


def test_unproven_pages_are_no_prefix(tmp_path: Path, prompt: list[int], expected: Stream) -> None:
    with pair(tmp_path) as two:
        silence(two.decode)
        stream, key = waiting_leg(two, prompt)
        request = two.decode.core.legs.open[key].request
        two.decode.core.on_handoff(lost(key))
        two.decode.core.on_handoff(DecodeReleased(key))
        finish(two.decode, stream)
        assert request.num_cached == 0
        assert stream.result == expected.result


def test_the_end_of_a_window_is_not_reused_as_a_prefix(tmp_path: Path, prompt: list[int], expected: Stream) -> None:
    with pair(tmp_path) as two:
        silence(two.decode)
        stream, key = waiting_leg(two, prompt)
        request = two.decode.core.legs.open[key].request
        # As if only the end of this group were wanted: its first page then begins with unwritten bytes.
        request.kv.uncached.add("target.full")
        two.decode.core.on_handoff(DecodeProgress(key, {"target.full": 96, "draft": 96}))
        two.decode.core.on_handoff(lost(key))
        two.decode.core.on_handoff(DecodeReleased(key))
        finish(two.decode, stream)
        assert request.num_cached == 0
        assert stream.result == expected.result


def test_a_shared_prefix_survives_the_failure(tmp_path: Path, prompt: list[int], expected: Stream) -> None:
    with pair(tmp_path) as two:
        first = two.legs("first", prompt, PARAMS, "push")[1]
        two.step_until(lambda: first.ended)
        two.settle()
        agent = silence(two.decode)
        stream, key = waiting_leg(two, prompt)
        assert agent.of(DecodePages)[-1].wanted["draft"].start > 90, "the prefix is here"
        request = two.decode.core.legs.open[key].request
        two.decode.core.on_handoff(lost(key))
        assert two.decode.core.load().num_quarantined_pages < 6
        finish(two.decode, stream)
        assert request.num_cached >= 96
        assert stream.result == expected.result
        two.decode.core.on_handoff(DecodeReleased(key))
        assert two.decode.is_idle()


@pytest.mark.parametrize(
    ("recovery", "recoverable"), [("none", True), ("retry", True), ("source", True), ("full", False)]
)
def test_an_error_where_recomputation_is_not_allowed(
    tmp_path: Path, prompt: list[int], recovery: str, recoverable: bool
) -> None:
    with pair(tmp_path, decode={"recovery": recovery}) as two:
        agent = silence(two.decode)
        stream, key = waiting_leg(two, prompt)
        two.decode.core.on_handoff(lost(key, recoverable))
        assert stream.ended
        assert stream.error == "peer_lost: gone"
        assert stream.recoverable is recoverable
        assert agent.kinds == [DecodeLeg, DecodePages, GiveUp]
        assert agent.of(GiveUp) == [GiveUp("failed")]
        assert two.decode.core.load().num_quarantined_pages > 0
        two.decode.core.on_handoff(DecodeReleased(key))
        assert two.decode.is_idle()
        assert not two.decode.core.metrics.recoveries


def test_no_room_to_recompute_ends_in_time(tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory for one request: while its old pages are in quarantine there is none for the new ones.
    with pair(tmp_path, decode={"kv_cache_memory": 11 * PAGE_BYTES}) as two:
        silence(two.decode)
        stream, key = waiting_leg(two, prompt)
        two.decode.core.on_handoff(lost(key))
        for _ in range(3):
            two.decode.step()
        assert not stream.ended
        late = time.monotonic() + two.decode.core.legs.settings.handoff_timeout_s + 1.0
        monkeypatch.setattr(two.decode.core.clock, "monotonic", lambda: late)
        two.decode.step()
        assert stream.ended
        assert stream.error == "no_room: no pages came free to recompute"
        assert stream.recoverable
        two.decode.core.on_handoff(DecodeReleased(key))
        assert two.decode.is_idle()


def test_a_leg_gets_pages_in_the_step_in_which_a_recomputation_frees_them(
    tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path, decode={"kv_cache_memory": 11 * PAGE_BYTES}) as two:
        agent, core = silence(two.decode), two.decode.core
        stream, key = waiting_leg(two, prompt)
        core.on_handoff(lost(key))
        two.legs("behind", prompt[:20], PARAMS, "push")
        (behind,) = set(core.legs.open) - {key}
        core.on_handoff(DecodeAdmitted(behind))
        two.decode.step()
        assert agent.kinds.count(DecodePages) == 1
        late = time.monotonic() + core.legs.settings.handoff_timeout_s + 1.0
        monkeypatch.setattr(core.clock, "monotonic", lambda: late)
        two.decode.step()
        assert stream.ended
        assert agent.kinds.count(DecodePages) == 2
        core.abort("behind")
        core.on_handoff(DecodeReleased(key))
        core.on_handoff(DecodeReleased(behind))
        assert two.decode.is_idle()


def test_a_peer_cannot_end_a_request_with_a_token_that_was_known(
    tmp_path: Path, prompt: list[int], expected: Stream
) -> None:
    known = expected.token_ids[:4]
    with pair(tmp_path) as two:
        silence(two.decode)
        stream, key = waiting_leg(two, prompt, known)
        two.decode.core.on_handoff(DecodeFinished(key, Seeds(known[-1], None, [])))
        finish(two.decode, stream)
        assert stream.token_ids == expected.token_ids[4:]
        assert two.decode.core.metrics.handoff_failures["bad_seeds"] == 1
        assert two.decode.is_idle()


def test_a_client_that_leaves_meanwhile_frees_everything(tmp_path: Path, prompt: list[int]) -> None:
    with pair(tmp_path) as two:
        agent = silence(two.decode)
        _, key = waiting_leg(two, prompt)
        two.decode.core.on_handoff(lost(key))
        two.decode.step()
        two.decode.core.abort("r")
        assert two.decode.core.load().num_referenced_pages == 0
        assert agent.kinds == [DecodeLeg, DecodePages], "the attempt is over already"
        two.decode.core.on_handoff(DecodeReleased(key))
        assert two.decode.is_idle()


def test_a_ticket_for_an_earlier_incarnation_is_not_the_requests_fault(tmp_path: Path, prompt: list[int]) -> None:
    with pair(tmp_path) as two:
        # As a router that does not know of a restart would send.
        two.prefill.engine.info = msgspec.structs.replace(two.prefill.engine.info, incarnation="before")
        with pytest.raises(WrongEngineError) as refused:
            two.legs("r", prompt, PARAMS, "push")
        assert to_api_error(refused.value).status == 409, "a router takes this as: ask again who is there"


def wrong_token(seeds: Seeds) -> Seeds:
    return Seeds(999_999, seeds.first_logprobs, seeds.draft_token_ids)


def too_many(seeds: Seeds) -> Seeds:
    return Seeds(seeds.first_token, seeds.first_logprobs, [1] * 9)


def no_logprobs(seeds: Seeds) -> Seeds:
    return Seeds(seeds.first_token, None, seeds.draft_token_ids)


@pytest.mark.parametrize(
    ("alter", "known"),
    [
        (wrong_token, 0),
        (too_many, 0),
        (no_logprobs, 0),
        (lambda s: Seeds(EOS, s.first_logprobs, []), 0),
        (lambda s: Seeds(s.first_token ^ 1, None, []), 4),
    ],
)
def test_bad_seeds_are_not_decoded(
    tmp_path: Path, prompt: list[int], expected: Stream, alter: Callable[[Seeds], Seeds], known: int
) -> None:
    with pair(tmp_path) as two:
        two.prefill.core.legs.alter_seeds = alter
        _, rest = two.legs("r", prompt, PARAMS, "push", expected.token_ids[:known] or None)
        two.step_until(lambda: rest.ended)
        assert rest.token_ids == expected.token_ids[known:]
        assert two.decode.core.metrics.handoff_failures["bad_seeds"] == 1
        two.settle()


def test_a_longer_context_of_the_prefill_engine_is_not_drafted_into(tmp_path: Path, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with pair(tmp_path, decode={"max_model_len": 64}, max_model_len=128) as two:
        _, stream = two.legs("r", prompt[:62], params, "push")
        two.step_until(lambda: stream.ended)
        two.settle()
    assert (len(stream.token_ids), stream.finish_reason, stream.accepted) == (2, "length", [])


def test_a_request_that_loses_its_pages_before_its_first_step_sends_its_first_token_once(
    tmp_path: Path, prompt: list[int], expected: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path) as two:
        core = two.decode.core
        commit = core._committed

        def lost(request: Request, seeds: Seeds) -> None:
            commit(request, seeds)
            core.scheduler.preempt(request)

        monkeypatch.setattr(core, "_committed", lost)
        _, rest = two.legs("r", prompt, PARAMS, "push")
        two.step_until(lambda: rest.ended)
        assert rest.result == expected.result
        assert rest.positions == [*range(len(rest.token_ids))]
        assert core.scheduler.num_preemptions == 1
