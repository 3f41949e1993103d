"""What SGLang may do with a request's pages in each phase of its legs. The agent is a list of calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from baton.errors import HandoffError
from baton.handoff.agent.leg_events import DecodeLeg, DecodePages, GiveUp, PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.ticket import Redeemer, Ticket, sign_ticket
from baton.kv.interval import Interval, Rules
from baton.sglang.geometry import BufferLayout, RequestPages
from baton.sglang.legs import RankLegs, ReceiverLeg, SenderLeg, prompt_digest
from baton.testing import RecordingAgent
from baton.wire import EngineIdentity

KEY = b"k" * 32
PROMPT = list(range(10, 20))
SEEDS = Seeds(first_token=7)


def identity(name: str) -> EngineIdentity:
    address = [f"tcp://{name}:1"]
    return EngineIdentity(name, f"i{name}", address, "{}", 99, [], 0)


def ticket(prompt: list[int] = PROMPT) -> str:
    until = time.monotonic() + 60
    made = Ticket.between(identity("P"), identity("D"), "push", prompt_digest(prompt), (until, until))
    return sign_ticket(KEY, made)


def rank(name: str, page_size: int = 4, abort_timeout: float = 5.0) -> tuple[RankLegs, RecordingAgent]:
    rules = {"target.k.0": Rules("full", 0), "draft.k.0": Rules("full", 1)}
    layout = BufferLayout(page_size, [], {}, rules)
    legs = RankLegs(layout, Redeemer(KEY, name, f"i{name}"), abort_timeout=abort_timeout)
    agent = RecordingAgent()
    legs.bind(agent)
    return legs, agent


def key_of(leg: SenderLeg | ReceiverLeg) -> AttemptKey:
    assert leg.ticket is not None
    return leg.ticket.key


def test_a_prompt_is_declared_chunk_by_chunk_and_its_seeds_come_last() -> None:
    legs, agent = rank("P")
    leg = legs.open_prefill(ticket(), PROMPT)
    assert legs.poll(leg) == "ready"
    assert agent.kinds == [PrefillLeg]
    legs.scheduled(leg)
    legs.scheduled(leg)
    legs.computed(leg, RequestPages([3, 5]), 8, lambda: pytest.fail("the prompt is not computed yet"))
    legs.computed(leg, RequestPages([9]), 2, lambda: SEEDS)
    assert agent.kinds == [PrefillLeg, ev.PagesGiven, ev.Declared, ev.Declared, ev.Sampled]
    first, second = agent.of(ev.Declared)
    assert first.pages == {"target.k.0": [3, 5], "draft.k.0": [3, 5]}
    assert first.final == {"target.k.0": 8, "draft.k.0": 8}
    assert second.pages["draft.k.0"] == [3, 5, 9]
    assert second.final == {"target.k.0": 10, "draft.k.0": 10}
    assert agent.of(ev.Sampled)[0].seeds == SEEDS


def test_a_decode_leg_gets_pages_after_admission_only() -> None:
    legs, agent = rank("D")
    leg = legs.open_decode(ticket(), PROMPT)
    assert legs.poll(leg) == "waiting"
    legs.post(ev.DecodeAdmitted(key_of(leg)))
    assert legs.poll(leg) == "ready"
    legs.place(leg, 4, RequestPages([6, 7]))
    (opened,) = agent.of(DecodePages)
    assert opened.prompt_len == 10
    assert opened.wanted == {"target.k.0": Interval(4, 10), "draft.k.0": Interval(4, 10)}
    assert opened.pages["target.k.0"] == [0, 6, 7]
    legs.post(ev.DecodeCommitted(key_of(leg), SEEDS, 100, 3))
    assert legs.poll(leg) == "done"
    assert leg.seeds == SEEDS
    assert legs.counts == {"committed": 1, "bytes": 100, "runs": 3}


def test_a_scheduler_without_work_waits_for_the_agent_while_a_leg_is_in_flight() -> None:
    legs, _ = rank("D")
    legs.rest(seconds=3600)  # no leg, so there is nothing to wait for
    leg = legs.open_decode(ticket(), PROMPT)
    legs.rest(seconds=0.001)
    assert leg.phase == "waiting"
    threading.Timer(0.01, lambda: legs.post(ev.DecodeAdmitted(key_of(leg)))).start()
    legs.rest(seconds=3600)
    assert leg.phase == "ready"


def test_an_aborted_decode_legs_pages_stay_until_no_copy_can_write_to_them() -> None:
    """Field class F: pages freed while the write goes on, and the next request gets another's KV."""
    legs, agent = rank("D")
    leg = legs.open_decode(ticket(), PROMPT)
    legs.post(ev.DecodeAdmitted(key_of(leg)))
    legs.poll(leg)
    legs.place(leg, 0, RequestPages([1, 2, 3]))
    legs.abort(leg)
    assert agent.kinds[-1] is GiveUp
    assert legs.poll(leg) == "moving"
    legs.post(ev.DecodeReleased(key_of(leg)))
    assert legs.poll(leg) == "failed"
    assert leg.why == "aborted"


def test_a_hit_on_the_whole_prompt_is_refused_if_the_drafters_last_entry_must_move() -> None:
    legs, agent = rank("D")
    leg = legs.open_decode(ticket(), PROMPT)
    legs.post(ev.DecodeAdmitted(key_of(leg)))
    legs.poll(leg)
    legs.place(leg, 10, [])
    assert agent.kinds == [DecodeLeg, GiveUp]
    legs.post(ev.DecodeReleased(key_of(leg)))
    assert legs.poll(leg) == "failed"
    assert "the drafter's last entry" in leg.why


@pytest.mark.parametrize("admitted", [True, False])
def test_an_aborted_leg_without_pages_gets_none(admitted: bool) -> None:
    legs, agent = rank("D")
    leg = legs.open_decode(ticket(), PROMPT)
    legs.abort(leg)
    if admitted:  # it had been on its way
        legs.post(ev.DecodeAdmitted(key_of(leg)))
    assert legs.poll(leg) == "waiting"
    legs.place(leg, 0, [1, 2, 3])
    assert DecodePages not in agent.kinds


def test_a_dead_peer_fails_the_leg_by_name_after_its_pages_are_quiet() -> None:
    """Field class H."""
    legs, _ = rank("D")
    leg = legs.open_decode(ticket(), PROMPT)
    legs.post(ev.DecodeAdmitted(key_of(leg)))
    legs.poll(leg)
    legs.place(leg, 0, RequestPages([1, 2, 3]))
    legs.post(ev.DecodeFailed(key_of(leg), "peer_lost", "P is silent", recoverable=True))
    assert legs.poll(leg) == "moving"
    legs.post(ev.DecodeReleased(key_of(leg)))
    assert legs.poll(leg) == "failed"
    assert leg.why == "peer_lost: P is silent"
    assert legs.counts["failed_peer_lost"] == 1


def test_a_commitment_that_crosses_an_abort_is_not_used() -> None:
    legs, _ = rank("D")
    leg = legs.open_decode(ticket(), PROMPT)
    legs.abort(leg)
    legs.post(ev.DecodeCommitted(key_of(leg), SEEDS, 1, 1))
    assert legs.poll(leg) == "failed"


def test_a_prefill_leg_that_was_given_up_declares_nothing_more() -> None:
    legs, agent = rank("P")
    leg = legs.open_prefill(ticket(), PROMPT)
    legs.computed(leg, RequestPages([1, 2]), 8, lambda: SEEDS)
    legs.abort(leg)
    calls = len(agent.posted)
    legs.computed(leg, [3], 2, lambda: SEEDS)
    assert len(agent.posted) == calls
    legs.post(ev.PrefillReleased(key_of(leg), "aborted"))
    assert legs.poll(leg) == "failed"


def test_an_agent_that_hangs_ends_the_server_rather_than_let_pages_be_reused() -> None:
    legs, agent = rank("P", abort_timeout=0.01)
    leg = legs.open_prefill(ticket(), PROMPT)
    agent.hangs = True
    with pytest.raises(HandoffError, match="does not give up"):
        legs.abort(leg)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (lambda: None, "no ticket"),
        (lambda: "10.0.0.1", "ticket"),
        (lambda: ticket(PROMPT[:-1]), "another request"),
    ],
    ids=["none", "an address", "another prompt's"],
)
def test_a_leg_without_its_own_ticket_is_refused(text: Callable[[], str | None], why: str) -> None:
    """What a client sends chooses no address and no other request's KV."""
    for legs, agent, opened in [(*rank("P"), "open_prefill"), (*rank("D"), "open_decode")]:
        leg = getattr(legs, opened)(text(), PROMPT)
        assert legs.poll(leg) == "failed"
        assert why in leg.why
        assert not agent.posted
        assert legs.counts == {"refused": 1}
        legs.abort(leg)  # SGLang aborts what failed
        assert not agent.posted


def test_a_ticket_serves_one_request() -> None:
    legs, _ = rank("D")
    text = ticket()
    assert legs.open_decode(text, PROMPT).ticket is not None
    again = legs.open_decode(text, PROMPT)
    assert legs.poll(again) == "failed"
    assert "used before" in again.why


def agreed(phases: list[tuple[RankLegs, SenderLeg | ReceiverLeg]]) -> list[str]:
    """What each tensor rank may act on. The ranks run one after the other: first each says what it has."""
    said: list[list[int]] = []

    def note(values: list[int]) -> list[int]:
        said.append(values)
        raise InterruptedError

    for legs, leg in phases:
        with pytest.raises(InterruptedError):
            legs.agree([leg], note)
    least = [min(values) for values in zip(*said, strict=True)]
    for legs, leg in phases:
        legs.agree([leg], lambda _: least)
    return [leg.agreed for _, leg in phases]


def test_no_rank_reports_a_failure_while_another_ranks_pages_are_written_to() -> None:
    """SGLang takes the least of all ranks' states, and a failure is the least: it would free the pages of all."""
    ranks = []
    for _ in range(2):
        legs, agent = rank("D")
        leg = legs.open_decode(ticket(), PROMPT)
        legs.post(ev.DecodeAdmitted(key_of(leg)))
        legs.poll(leg)
        legs.place(leg, 0, RequestPages([1, 2, 3]))
        ranks.append((legs, leg, agent))
    both = [(legs, leg) for legs, leg, _ in ranks]
    assert agreed(both) == ["moving", "moving"]
    (first, one, _), (second, other, busy) = ranks
    first.post(ev.DecodeReleased(key_of(one)))
    assert agreed(both) == ["moving", "moving"]
    assert busy.kinds[-1] is GiveUp, "the other rank's part is given up"
    second.post(ev.DecodeReleased(key_of(other)))
    assert agreed(both) == ["failed", "failed"]
    assert other.why == "the request failed on another tensor rank"


def test_a_commitment_on_one_rank_is_not_used_if_another_rank_failed() -> None:
    ranks = []
    for _ in range(2):
        legs, _ = rank("D")
        leg = legs.open_decode(ticket(), PROMPT)
        ranks.append((legs, leg))
    (first, one), (second, other) = ranks
    first.post(ev.DecodeCommitted(key_of(one), SEEDS, 1, 1))
    assert agreed(ranks) == ["done", "waiting"]
    second.post(ev.DecodeReleased(key_of(other)))
    # The least of both is a failure.
    assert agreed(ranks) == ["done", "failed"]
