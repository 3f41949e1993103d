"""Decode legs that have blocks before P has admitted them: which may, and what the worker then does. Without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from baton.handoff.agent.leg_events import DecodeLeg, DecodePages
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.kv.interval import Interval
from baton.testing import RecordingAgent
from baton.vllm.caches import most_blocks
from baton.vllm.memory.groups import CacheTable, EarlyBlocks
from baton.vllm.scheduler import SchedulerSide
from baton.vllm.steps import AnnounceDecode, OpenDecode, StepNews
from baton.vllm.worker import Results
from tests.vllm.test_plugin_scheduler import FULL, leg, side, ticket
from tests.vllm.test_plugin_worker import both, make_worker
from tests.vllm.test_plugin_worker import ticket as signed_ticket

PAGES = ([4, 5, 6, 7],)


@dataclass
class Counts:
    num_gpu_blocks: int = 101
    num_free: int = 100

    def get_num_free_blocks(self) -> int:
        return self.num_free


def blocks(pool: Counts, *most: int, tables: tuple[CacheTable, ...] = (FULL,)) -> EarlyBlocks:
    return EarlyBlocks(tables, pool, most)


def decode_side(pool: Counts, num_workers: int = 1) -> SchedulerSide:
    d = side("D", num_workers=num_workers)
    d.early = blocks(pool, 40)
    return d


# ---------------------------------------------------------------- which legs


def test_early_legs_leave_room_for_the_longest_request() -> None:
    # 80 tokens are 20 blocks of 4, and two for what follows.
    early = blocks(Counts(), 40)
    early.allocated("a", 80)
    assert early.fits(80)
    early.allocated("b", 80)
    assert not early.fits(80)
    assert early.fits(56)
    assert not early.fits(57)
    early.ended("a")
    assert early.fits(80)
    early.ended("a")
    early.ended("unknown")


@pytest.mark.parametrize(("num_free", "fits"), [(100, True), (72, True), (71, False), (0, False)])
def test_early_legs_leave_half_of_the_pool_free(num_free: int, fits: bool) -> None:
    assert blocks(Counts(num_free=num_free), 40).fits(80) == fits


@pytest.mark.parametrize(
    ("most", "tables", "fits"),
    [
        ((40, 39), (FULL, CacheTable(1, "full", None, 4, ())), False),  # 44 blocks, and 79 for another
        ((40, 16), (FULL, CacheTable(1, "sliding_window", 8, 4, ())), True),  # a window has at most 16
        ((40, 2), (FULL, CacheTable(1, "state", None, 1, ())), True),  # a state has two
        ((40, 17), (FULL, CacheTable(1, "state", None, 1, ())), True),
        ((40, 20), (FULL, CacheTable(1, "state", None, 1, ())), False),
        ((40,), (FULL, CacheTable(0, "mla", None, 4, ())), True),  # one table
    ],
)
def test_blocks_of_all_tables_count(most: tuple[int, ...], tables: tuple[CacheTable, ...], fits: bool) -> None:
    assert blocks(Counts(), *most, tables=tables).fits(80) == fits


def test_blocks_of_the_longest_request_are_those_of_all_groups() -> None:
    specs = [SimpleNamespace(max_memory_usage_bytes=lambda config: config * 10, page_size_bytes=n) for n in (10, 7)]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    assert most_blocks(3, SimpleNamespace(kv_cache_groups=groups)) == [3, 5]


@pytest.mark.parametrize("end", ["received", "failed", "admitted"])
def test_a_leg_with_room_gets_its_blocks_in_its_first_turn(end: str) -> None:
    pool, t = Counts(), ticket()
    d = decode_side(pool)
    d.on_new_request(leg("decode", t))
    assert d.num_matched("decode-1", 0) == 9
    d.on_allocated("decode-1", ([1, 2, 3],), 9)
    step = d.take_step()
    assert step.announced == [AnnounceDecode("decode-1", t, 109)]
    assert step.receives == [OpenDecode("decode-1", t, 9, 0, ([1, 2, 3],), parked=True, admitted=False)]
    assert d.early is not None
    pool.num_gpu_blocks = 1 + 40 + 5 + 4  # no room for two legs of 5 blocks
    assert not d.early.fits(9)
    if end == "admitted":
        d.on_admitted([(0, "decode-1")])
    else:
        d.on_received("decode-1", failed=end == "failed")
    assert d.early.fits(9)


def test_a_leg_without_room_waits_until_all_workers_were_admitted() -> None:
    d = decode_side(Counts(num_free=40), num_workers=2)
    d.on_new_request(leg("decode", ticket()))
    d.on_admitted([(0, "decode-1")])
    assert d.num_matched("decode-1", 0) is None
    d.on_admitted([(1, "decode-1")])
    assert d.num_matched("decode-1", 0) == 9
    d.on_allocated("decode-1", ([1, 2, 3],), 9)
    assert d.take_step().receives[0].admitted


def test_an_aborted_leg_counts_until_its_blocks_are_quiet() -> None:
    pool = Counts()
    d = decode_side(pool)
    request = leg("decode", ticket())
    d.on_new_request(request)
    assert d.num_matched("decode-1", 0) == 9
    d.on_allocated("decode-1", ([1, 2, 3],), 9)
    d.on_finished(request)
    pool.num_gpu_blocks = 1 + 40 + 5 + 4
    assert d.early is not None
    assert not d.early.fits(9)
    d.on_received("decode-1")
    assert d.early.fits(9)


# ---------------------------------------------------------------- the worker


def test_a_leg_with_blocks_in_its_first_step_is_not_announced() -> None:
    agent, t, other = RecordingAgent(), signed_ticket(), signed_ticket()
    worker = make_worker(agent)
    announced = [AnnounceDecode("r", t, 7), AnnounceDecode("s", other, 7)]
    early = OpenDecode("r", t, 99, 32, PAGES, parked=True, admitted=False)
    worker.begin(StepNews(announced=announced, receives=[early]))
    assert agent.posted == [
        (other.key, DecodeLeg(other)),
        (t.key, DecodePages(t, 99, both(Interval(32, 99)), both([4, 5, 6, 7]), admitted=False)),
    ]
    worker.post(ev.DecodeCommitted(t.key, Seeds(first_token=7), 100, 2))
    assert worker.results() == Results(received={"r"})
