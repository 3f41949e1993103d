"""Prefill legs that hand over their whole prompt and the first token, and those that D never fetches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from baton.handoff.agent.leg_events import GiveUp, PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket, sign_ticket
from baton.testing import RecordingAgent
from baton.vllm.memory.geometry import describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.scheduler import SchedulerSide, handoff_digest
from baton.vllm.steps import AnnounceDecode, ClosePrefill, ComputedTokens, OpenDecode, OpenPrefill, StepNews
from baton.vllm.worker import WorkerSide
from baton.wire import VllmIdentity
from testkit.handoffs.tickets import make_ticket, signed

KEY = b"k" * 32
PROMPT = list(range(100, 110))
FIRST = 77


@dataclass
class Request:
    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: dict[str, Any] | None
    output_token_ids: list[int] = field(default_factory=list)
    max_tokens: int = 1
    prompt_embeds: Any = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    sampling_params: Any = None


class Pool:
    blocks: Sequence[Any] = range(100)

    def touch(self, blocks: Sequence[Any]) -> None:
        assert not blocks

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        assert not ordered_blocks


def ticket(handed_over: Sequence[int] = PROMPT, expiry: float = 60.0) -> SignedTicket:
    digest, engines = handoff_digest(handed_over), {"prefill_incarnation": "p", "decode_incarnation": "d"}
    return signed(make_ticket(prefill_expiry=expiry, decode_expiry=expiry, request_digest=digest, **engines), KEY)


def identity(engine: str) -> VllmIdentity:
    return VllmIdentity(
        engine,
        engine.lower(),
        ["tcp://127.0.0.1:1"],
        "{}",
        512,
        [2],
        0,
        truncate_prefill=False,
        roles=["prefill", "decode"],
    )


def side(engine: str) -> SchedulerSide:
    return SchedulerSide(identity(engine), KEY, [CacheTable(0, "full", None, 32, ())], Pool(), clock=lambda: 0.0)


def leg(t: Ticket, role: str, prompt: Sequence[int], **params: Any) -> Request:
    return Request(f"{role}-1", prompt, {"baton": {"role": role, "ticket": sign_ticket(KEY, t), **params}})


def cancel(t: Ticket, key: bytes = KEY) -> Request:
    return Request("cancel-1", [0], {"baton": {"role": "cancel", "ticket": sign_ticket(key, t)}})


def seeded_leg(p: SchedulerSide, t: Ticket) -> Request:
    request = leg(t, "prefill", PROMPT, seed_first_token=True)
    p.on_new_request(request)
    assert p.take_step().opened == [OpenPrefill("prefill-1", t, 10, None, seeded=True)]
    p.on_scheduled("prefill-1", 10, ([1],), replace=True)
    assert p.take_step() == StepNews(admitted=[t.key], computed=[ComputedTokens(t.key, 10, ([1],))])
    return request


def test_the_whole_prompt_is_handed_over_with_the_first_token() -> None:
    p, d, t = side("P"), side("D"), ticket()
    request = seeded_leg(p, t)
    request.output_token_ids.append(FIRST)
    assert p.on_finished(request) == (True, None)
    assert p.take_step().closed == [ClosePrefill(t.key, held=True, failed=False, sampled=FIRST)]
    decode = leg(t, "decode", [*PROMPT, FIRST])
    d.on_new_request(decode)
    assert d.take_step().announced == [AnnounceDecode("decode-1", t, FIRST)]
    d.on_admitted([(0, "decode-1")])
    assert d.num_matched("decode-1", 4) == 6
    d.on_allocated("decode-1", ([5],), 6)
    assert d.take_step().receives == [OpenDecode("decode-1", t, 10, 4, ([5],), True)]


def test_a_leg_that_ends_without_a_token_has_failed() -> None:
    p, t = side("P"), ticket()
    assert p.on_finished(seeded_leg(p, t)) == (True, None)
    assert p.take_step().closed == [ClosePrefill(t.key, held=True, failed=True)]


def test_a_ticket_for_another_length_permits_nothing() -> None:
    p = side("P")
    p.on_new_request(leg(ticket(PROMPT[:-1]), "prefill", PROMPT, seed_first_token=True))
    p.on_new_request(leg(ticket(), "prefill", PROMPT))
    assert p.take_step() == StepNews()
    assert sum(p.refused.values()) == 2


@pytest.mark.parametrize("finished", [True, False])
def test_a_cancelled_leg_is_let_go(finished: bool) -> None:
    p, t, other = side("P"), ticket(), ticket()
    request = seeded_leg(p, t)
    request.output_token_ids.append(FIRST)
    if finished:
        p.on_finished(request)
        p.take_step()
    p.on_new_request(cancel(other))
    assert p.take_step() == StepNews(), "that one is another's"
    p.on_new_request(cancel(t))
    if finished:
        assert p.take_step().cancelled == [t.key]
    else:
        assert p.on_finished(request) == (True, None)
        assert p.take_step().closed == [ClosePrefill(t.key, held=True, failed=True, sampled=FIRST)]
    p.on_new_request(cancel(t))
    assert p.on_finished(cancel(t)) == (False, None)


@pytest.mark.parametrize("why", ["forged", "expired", "none"])
def test_only_the_router_cancels(why: str) -> None:
    p, t = side("P"), ticket()
    request = seeded_leg(p, t)
    request.output_token_ids.append(FIRST)
    p.on_finished(request)
    p.take_step()
    hostile = cancel(t, b"x" * 32) if why == "forged" else cancel(ticket(expiry=0.0) if why == "expired" else t)
    if why == "none":
        assert hostile.kv_transfer_params is not None
        hostile.kv_transfer_params["baton"]["ticket"] = ""
    p.on_new_request(hostile)
    assert not p.has_news()
    assert sum(p.refused.values()) == 1


@pytest.fixture
def agent() -> RecordingAgent:
    return RecordingAgent()


@pytest.fixture
def worker(agent: RecordingAgent) -> WorkerSide:
    buffer = torch.zeros(2, 20, 2, 32, 16)
    caches = {f"model.layers.{i}.attn": buffer[i] for i in range(2)}
    groups = split_tables([CacheTable(0, "full", None, 32, tuple(caches))], num_target_layers=2)
    side = WorkerSide(describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension")))
    side.bind(agent)
    return side


def test_a_seeded_leg_is_committed_with_the_token_that_was_sampled(agent: RecordingAgent, worker: WorkerSide) -> None:
    t = ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 10, None, seeded=True)]))
    worker.finalise([ComputedTokens(t.key, 10, ([1],))])
    assert agent.kinds == [PrefillLeg, ev.Declared]
    worker.begin(StepNews(closed=[ClosePrefill(t.key, held=True, failed=False, sampled=FIRST)]))
    assert agent.posted[-1] == (t.key, ev.Sampled(Seeds(first_token=FIRST), False, {}))
    assert not worker.results().sent
    worker.post(ev.PrefillReleased(t.key, "committed"))
    assert worker.results().sent == {"r"}


def test_a_cancelled_leg_is_aborted_once(agent: RecordingAgent, worker: WorkerSide) -> None:
    t = ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 10, None, seeded=True)]))
    worker.finalise([ComputedTokens(t.key, 10, ([1],))])
    worker.begin(StepNews(closed=[ClosePrefill(t.key, held=True, failed=False, sampled=FIRST)]))
    worker.begin(StepNews(cancelled=[t.key]))
    assert agent.posted[-1] == (t.key, GiveUp("cancelled"))
    worker.post(ev.PrefillReleased(t.key, "aborted"))
    assert worker.results().sent == {"r"}
    num_calls = len(agent.posted)
    worker.begin(StepNews(cancelled=[t.key, ticket().key]))
    assert len(agent.posted) == num_calls
