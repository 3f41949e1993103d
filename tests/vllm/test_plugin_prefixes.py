"""Legs of hand-backs in the plug-in, without vLLM: what the source lacks, and what the destination got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from baton.handoff.agent.leg_events import GiveUp
from baton.handoff.protocol.ticket import SignedTicket, sign_ticket
from baton.testing import RecordingAgent
from baton.vllm.memory.geometry import describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.scheduler import SchedulerSide
from baton.vllm.steps import ClosePrefill, OpenPrefill, StepNews
from baton.vllm.worker import WorkerSide
from tests.vllm.test_plugin_scheduler import FULL, KEY, PROMPT, Pool, Request, side, ticket


def arrived(
    engine: SchedulerSide,
    role: str,
    t: SignedTicket,
    prefix: bool = True,
    prompt: Sequence[int] = PROMPT,
    **more: Any,
) -> Request:
    params: dict[str, Any] = {"role": role, "ticket": sign_ticket(KEY, t), "prefix": prefix, **more}
    request = Request(f"{role}-1", prompt, {"baton": params})
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


@pytest.mark.parametrize(("hit", "comes"), [(0, 9), (4, 5), (9, 0), (12, 0)])
def test_a_destination_computes_what_follows_the_prefix(hit: int, comes: int) -> None:
    """It asks for 9 tokens, whose digest the ticket has, of a longer prompt."""
    d, t = side("D"), ticket()
    request = arrived(d, "decode", t, prompt=[*PROMPT, 7, 8, 9, 10], num_tokens=9)
    d.on_admitted([(0, "decode-1")])
    assert d.num_matched("decode-1", hit) == comes
    d.on_allocated("decode-1", ([1, 2, 3],), comes)
    (opened,) = d.take_step().receives
    assert (opened.num_tokens, opened.hit, opened.parked) == (9, 9 - comes, comes > 0)
    if comes:
        d.on_received("decode-1")
    assert d.on_finished(request) == (False, {"baton": {"num_tokens": 9}})


@pytest.mark.parametrize("num_tokens", [8, 10, 11])
def test_a_leg_of_other_tokens_than_the_tickets_is_refused(num_tokens: int) -> None:
    d = side("D")
    arrived(d, "decode", ticket(), prompt=[*PROMPT, 7, 8, 9, 10], num_tokens=num_tokens)
    assert d.num_matched("decode-1", 0) == 0
    assert d.refused.total() == 1


WINDOW = CacheTable(1, "sliding_window", 4, 4, ())  # the query after 9 tokens sees entries from 6 on


@dataclass
class EvictingPool(Pool):
    evicted: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(block_ids)


@pytest.mark.parametrize(
    ("whole", "hit", "tile", "evicted"),
    [(False, 0, 1, [{8}]), (False, 0, 2, [{8}]), (False, 0, 4, []), (False, 8, 1, []), (True, 0, 1, [])],
)
def test_a_windows_first_block_is_no_prefix_unless_all_of_it_came(
    whole: bool, hit: int, tile: int, evicted: list[set[int]]
) -> None:
    pool = EvictingPool()
    d, t = side("D", tables=(FULL, WINDOW), pool=pool, window_tile=tile), ticket()
    arrived(d, "decode", t, prefix=False, whole_blocks=whole)
    d.on_admitted([(0, "decode-1")])
    d.on_allocated("decode-1", ([1, 2, 3], [0, 8, 9]), 9 - hit)
    assert [opened.whole_blocks for opened in d.take_step().receives] == [whole]
    assert d.num_matched("other", 0) == 0, "vLLM has not entered it yet"
    d.on_received("decode-1")
    assert d.num_matched("other", 0) == (None if evicted else 0)
    d.on_scheduled("decode-1", 10, None, replace=False)
    assert d.num_matched("other", 0) == 0
    assert pool.evicted == evicted


@pytest.mark.parametrize("end", ["failed", "aborted before", "aborted after"])
def test_a_leg_that_ends_otherwise_keeps_nobody_waiting(end: str) -> None:
    pool = EvictingPool()
    d, t = side("D", tables=(FULL, WINDOW), pool=pool), ticket()
    request = arrived(d, "decode", t, prefix=False)
    d.on_admitted([(0, "decode-1")])
    d.on_allocated("decode-1", ([1, 2, 3], [0, 8, 9]), 9)
    if end == "aborted before":
        d.on_finished(request)
    d.on_received("decode-1", failed=end == "failed")
    if end == "aborted after":
        assert d.num_matched("other", 0) is None
        d.on_finished(request)
    assert d.num_matched("other", 0) == 0
    assert pool.evicted == ([{8}] if end == "aborted after" else [])


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
