"""Legs of hand-backs in the plug-in, without vLLM: what the source lacks, and what the destination got."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.handoff.agent.leg_events import GiveUp
from baton.handoff.protocol.ticket import SignedTicket, sign_ticket
from baton.testing import RecordingAgent
from baton.vllm.geometry import describe_caches
from baton.vllm.groups import CacheTable, split_tables
from baton.vllm.scheduler import SchedulerSide
from baton.vllm.steps import ClosePrefill, OpenPrefill, StepNews
from baton.vllm.worker import WorkerSide
from tests.vllm.test_plugin_scheduler import KEY, PROMPT, Request, side, ticket


def arrived(engine: SchedulerSide, role: str, t: SignedTicket, prefix: bool = True) -> Request:
    params: dict[str, Any] = {"role": role, "ticket": sign_ticket(KEY, t), "prefix": prefix}
    request = Request(f"{role}-1", PROMPT, {"baton": params})
    engine.on_new_request(request)
    engine.take_step()
    return request


@pytest.mark.parametrize(("num_computed", "prefix", "missing"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_source_that_lacks_more_than_two_blocks_gives_its_leg_up(
    num_computed: int, prefix: bool, missing: bool
) -> None:
    p, t = side("P"), ticket()
    request = arrived(p, "prefill", t, prefix)
    found = None if missing else 0
    assert [p.num_matched("prefill-1", num_computed) for _ in range(2)] == [found, found]
    assert p.take_step().missing == [t.key] * missing, "the agent is told once"
    assert p.num_matched("prefill-1", num_computed) == found
    assert not p.has_news()
    if missing:
        assert p.num_matched("prefill-1", 9) is None, "what comes later is of no use: the leg has been given up"
        assert p.on_finished(request) == (False, None)
        assert p.take_step().closed == [ClosePrefill(t.key, held=False, failed=True)]


def test_a_leg_that_is_computed_is_not_given_up_when_vllm_looks_again() -> None:
    p, t = side("P"), ticket()
    arrived(p, "prefill", t)
    assert p.num_matched("prefill-1", 8) == 0
    p.on_scheduled("prefill-1", 10, ([1, 2, 3],), replace=True)
    assert p.num_matched("prefill-1", 0) == 0
    assert p.take_step().missing == []


@pytest.mark.parametrize(("end", "found"), [("received", 9), ("failed", 4), ("here", 9), ("aborted", None)])
def test_a_destination_tells_what_it_need_not_compute(end: str, found: int | None) -> None:
    d, t = side("D"), ticket()
    request = arrived(d, "decode", t)
    d.on_admitted([(0, "decode-1")])
    d.on_allocated("decode-1", ([1, 2, 3],), 0 if end == "here" else 5)
    if end in ("received", "failed"):
        d.on_received("decode-1", failed=end == "failed")
    told = None if found is None else {"baton": {"num_tokens": found}}
    assert d.on_finished(request) == (False, told)
    assert d.on_finished(request) == (False, None)


def test_other_decode_legs_tell_nothing() -> None:
    d = side("D")
    request = arrived(d, "decode", ticket(), prefix=False)
    d.on_admitted([(0, "decode-1")])
    d.on_allocated("decode-1", ([1, 2, 3],), 9)
    d.on_received("decode-1")
    assert d.on_finished(request) == (False, None)


def test_the_agent_tells_the_destination_why() -> None:
    agent, t = RecordingAgent(), ticket()
    caches = {f"model.layers.{i}.attn": torch.zeros(20, 2, 32, 16) for i in range(2)}
    groups = split_tables([CacheTable(0, "full", None, 32, tuple(caches))], num_target_layers=2)
    worker = WorkerSide(describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension")))
    worker.bind(agent)
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 9, 109)], missing=[t.key, ticket().key]))
    assert agent.posted[-1] == (t.key, GiveUp("prefix_missing"))
