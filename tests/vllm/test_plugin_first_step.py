"""`first_step` "verify": P's first token comes with COMMIT, and is a draft of D's first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.handoff.agent.leg_events import PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.testing import RecordingAgent
from baton.vllm import support
from baton.vllm.first_step import FirstTokens
from baton.vllm.memory.geometry import describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.scheduler import CloseNow, SchedulerSide
from baton.vllm.steps import AnnounceDecode, ClosePrefill, ComputedTokens, OpenDecode, OpenPrefill, StepNews
from baton.vllm.worker import WorkerSide
from tests.vllm.test_plugin_seeded import FIRST, KEY, PROMPT, Pool, Request, identity, leg, ticket

LAST = PROMPT[-1]


@pytest.fixture
def t() -> SignedTicket:
    return ticket(PROMPT[:-1])


@pytest.fixture
def worker() -> tuple[WorkerSide, RecordingAgent]:
    buffer = torch.zeros(2, 20, 2, 32, 16)
    caches = {f"model.layers.{i}.attn": buffer[i] for i in range(2)}
    groups = split_tables([CacheTable(0, "full", None, 32, tuple(caches))], num_target_layers=2)
    side, agent = WorkerSide(describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension"))), RecordingAgent()
    side.bind(agent)
    return side, agent


def verifying(engine: str, close_now: CloseNow | None = None) -> SchedulerSide:
    tables = [CacheTable(0, "full", None, 32, ())]
    return SchedulerSide(
        identity(engine), KEY, tables, Pool(), clock=lambda: 0.0, verify_first=True, close_now=close_now
    )


def prefill(side: SchedulerSide, t: SignedTicket, temperature: float) -> Request:
    request = leg(t, "prefill", PROMPT)
    request.sampling_params = SimpleNamespace(temperature=temperature)
    side.on_new_request(request)
    return request


def test_nobody_waits_for_the_token_of_a_greedy_hand_back(t: SignedTicket) -> None:
    p, request = verifying("P"), leg(t, "prefill", PROMPT, prefix=True)
    request.sampling_params = SimpleNamespace(temperature=0.0)
    p.on_new_request(request)
    assert p.take_step().opened == [OpenPrefill("prefill-1", t, 9, LAST, seeded=False)]


def test_a_greedy_leg_is_committed_with_its_first_token(
    t: SignedTicket, worker: tuple[WorkerSide, RecordingAgent]
) -> None:
    p, (side, agent) = verifying("P"), worker
    request = prefill(p, t, 0.0)
    opened = p.take_step()
    assert opened.opened == [OpenPrefill("prefill-1", t, 9, LAST, seeded=True)]
    side.begin(opened)
    side.finalise([ComputedTokens(t.key, 10, ([1],))])
    assert agent.kinds == [PrefillLeg, ev.Declared]
    p.on_scheduled("prefill-1", 10, ([1],), replace=True)
    p.take_step()
    request.output_token_ids.append(FIRST)
    p.on_finished(request)
    closed = p.take_step().closed
    assert closed == [ClosePrefill(t.key, held=True, failed=False, sampled=FIRST)]
    side.begin(StepNews(closed=closed))
    assert agent.posted[-1] == (t.key, ev.Sampled(Seeds(LAST, draft_token_ids=[FIRST]), False, {}))


@pytest.mark.parametrize(("computed", "abort"), [(10, False), (0, False), (10, True)])
def test_with_the_worker_in_its_process_p_commits_before_its_next_step(
    t: SignedTicket, worker: tuple[WorkerSide, RecordingAgent], computed: int, abort: bool
) -> None:
    """Not a leg that vLLM ends while its prompt is computed, nor one that is given up."""
    side, agent = worker
    p = verifying("P", side.close_now)
    request = prefill(p, t, 0.0)
    side.begin(p.take_step())
    side.finalise([ComputedTokens(t.key, computed, ([1],))])
    p.on_scheduled("prefill-1", 10, ([1],), replace=True)
    p.take_step()
    if not abort:
        request.output_token_ids.append(FIRST)
    p.on_finished(request)
    closed = p.take_step().closed
    if computed and not abort:
        assert closed == []
        assert agent.posted[-1] == (t.key, ev.Sampled(Seeds(LAST, draft_token_ids=[FIRST]), False, {}))
    else:
        assert closed == [ClosePrefill(t.key, held=True, failed=abort, sampled=None if abort else FIRST)]
        assert agent.kinds == [PrefillLeg, ev.Declared]


def test_a_sampled_leg_is_committed_when_its_prompt_is_computed(t: SignedTicket) -> None:
    """Its first token is drawn anew by the decode engine, with other noise."""
    p = verifying("P")
    prefill(p, t, 0.7)
    assert p.take_step().opened == [OpenPrefill("prefill-1", t, 9, LAST, seeded=False)]


@pytest.mark.parametrize("last", [LAST, LAST + 1])
def test_a_first_token_counts_only_after_the_prompt_that_both_know(
    t: SignedTicket, worker: tuple[WorkerSide, RecordingAgent], last: int
) -> None:
    side, _ = worker
    opened = OpenDecode("r", t, 9, 0, ([1],), parked=True)
    side.begin(StepNews(announced=[AnnounceDecode("r", t, LAST)], receives=[opened]))
    side.post(ev.DecodeCommitted(t.key, Seeds(last, draft_token_ids=[FIRST]), 1, 1))
    assert side.results().received == {"r"}
    assert side.take_first_tokens() == ({"r": FIRST} if last == LAST else {})
    assert side.take_first_tokens() == {}


def test_it_takes_the_place_of_the_first_placeholder_once() -> None:
    tokens, new = FirstTokens(), [SimpleNamespace(req_id="a"), SimpleNamespace(req_id="b")]
    tokens.add("a", FIRST)
    drafts = {"a": [-1, -1], "b": [-1, -1], "running": [5, 6]}
    tokens.place(new, drafts)
    assert drafts == {"a": [FIRST, -1], "b": [-1, -1], "running": [5, 6]}
    drafts = {"a": [-1, -1]}
    tokens.place(new, drafts)
    assert drafts == {"a": [-1, -1]}


def test_a_step_beside_other_prompts_has_no_placeholder() -> None:
    tokens, drafts = FirstTokens(), dict[str, list[int]]()
    tokens.add("a", FIRST)
    tokens.place([SimpleNamespace(req_id="a")], drafts)
    assert drafts == {}


def test_the_first_token_of_a_request_that_ended_is_forgotten(t: SignedTicket) -> None:
    d = verifying("D")
    decode = leg(t, "decode", PROMPT)
    d.on_new_request(decode)
    d.on_first_tokens({"decode-1": FIRST, "another": FIRST})
    d.on_received("decode-1")
    d.on_finished(decode)
    drafts = {"decode-1": [-1], "another": [-1]}
    d.first_tokens.place([SimpleNamespace(req_id=name) for name in drafts], drafts)
    assert drafts == {"decode-1": [-1], "another": [-1]}


PLAIN: dict[str, Any] = {
    "speculative_config": object(),
    "use_v2_model_runner": False,
    "scheduler_config": SimpleNamespace(async_scheduling=False),
    "model_config": SimpleNamespace(has_inner_state=False),
}


@pytest.mark.parametrize(
    ("version", "changes", "why"),
    [
        ("0.32", {}, None),
        ("0.33", {}, "0.33"),
        ("0.32", {"speculative_config": None}, "needs speculation"),
        ("0.32", {"use_v2_model_runner": True}, "V1"),
        ("0.32", {"scheduler_config": SimpleNamespace(async_scheduling=True)}, "V1"),
        ("0.32", {"model_config": SimpleNamespace(has_inner_state=True)}, "states"),
    ],
)
def test_the_first_token_is_verified_if_it_can_be(
    version: str, changes: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "check_version", lambda: version)
    config = SimpleNamespace(**PLAIN | changes)
    assert support.first_step_of(config, None) == ("verify" if why is None else "recompute")
    assert support.first_step_of(config, "recompute") == "recompute"
    if why is None:
        assert support.first_step_of(config, "verify") == "verify"
    else:
        with pytest.raises(ConfigError, match=f"first_step.*{why}"):
            support.first_step_of(config, "verify")
