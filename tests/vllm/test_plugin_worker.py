"""The connector's half in the worker, with an agent that records and without vLLM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from baton.errors import HandoffError
from baton.handoff.agent.leg_events import DecodeLeg, DecodePages, GiveUp, PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.kv.interval import Interval
from baton.testing import RecordingAgent
from baton.vllm.memory.geometry import describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.steps import AnnounceDecode, ClosePrefill, ComputedTokens, OpenDecode, OpenPrefill, StepNews
from baton.vllm.worker import Results, WorkerSide
from testkit.handoffs.tickets import make_ticket

T = TypeVar("T")


@pytest.fixture
def agent() -> RecordingAgent:
    return RecordingAgent()


@pytest.fixture
def worker(agent: RecordingAgent) -> WorkerSide:
    return make_worker(agent)


def make_worker(
    agent: RecordingAgent, commit_at_end: bool = False, abort_timeout: float = 20.0, **more: Any
) -> WorkerSide:
    buffer = torch.zeros(3, 20, 2, 32, 16)
    caches = {f"model.layers.{i}.attn": buffer[i] for i in range(3)}
    groups = split_tables([CacheTable(0, "full", None, 32, tuple(caches))], num_target_layers=2)
    layout = describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension"))
    side = WorkerSide(layout, commit_at_end, abort_timeout, **more)
    side.bind(agent)
    return side


def ticket() -> SignedTicket:
    return SignedTicket.of(make_ticket(), "signed")


def receive(worker: WorkerSide, opened: OpenDecode) -> None:
    """A decode leg that was announced, and has blocks."""
    worker.begin(StepNews(announced=[AnnounceDecode(opened.request_id, opened.ticket, 7)]))
    worker.begin(StepNews(receives=[opened]))


def both(value: Any) -> dict[str, Any]:
    return {"target.full.0": value, "draft.full.0": value}


def test_chunks_become_final_by_whole_tiles(worker: WorkerSide, agent: RecordingAgent) -> None:
    t = ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7)]))
    worker.finalise([ComputedTokens(t.key, 40, ([1, 2],))])
    worker.finalise([ComputedTokens(t.key, 100, ([1, 2, 3, 4],))])
    worker.finalise([ComputedTokens(t.key, 100, ([1, 2, 3, 4],))])
    assert agent.posted == [
        (t.key, PrefillLeg(t)),
        (t.key, ev.Declared(99, both([1, 2]), both(32))),
        (t.key, ev.Declared(99, both([1, 2, 3, 4]), both(99))),
        (t.key, ev.Sampled(Seeds(first_token=7), False, {})),
    ]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("preempted", [False, True])
def test_the_agent_works_once_the_token_is_sent(agent: RecordingAgent, seeded: bool, preempted: bool) -> None:
    worker, t, tables = make_worker(agent, alone=True), ticket(), ([1, 2, 3, 4],)
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7, seeded)]))
    worker.finalise([ComputedTokens(t.key, 100, tables)])
    tables[0].append(5)  # vLLM's table grows
    assert preempted or worker.close_now(ClosePrefill(t.key, held=True, failed=False, sampled=8))
    assert agent.kinds == [PrefillLeg]
    worker.release_preempted([t.key] if preempted else [])
    drafts = [8] if seeded else []
    expected = [ev.Declared(99, both([1, 2, 3, 4]), both(99)), ev.Sampled(Seeds(7, draft_token_ids=drafts), False, {})]
    if preempted:
        expected[1 if seeded else 2 :] = [GiveUp("preempted")]
    assert agent.posted[1:] == [(t.key, event) for event in expected]
    worker.begin(StepNews())
    assert len(agent.posted) == len(expected) + 1


@pytest.mark.parametrize("preempted", [False, True])
def test_a_runner_that_speaks_of_preemptions_late(agent: RecordingAgent, preempted: bool) -> None:
    """Blocks are not declared final before they are held for the leg."""
    worker, t = make_worker(agent, commit_at_end=True), ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7)]))
    worker.finalise([ComputedTokens(t.key, 100, ([1, 2, 3, 4],))])
    assert agent.kinds == [PrefillLeg, ev.Declared]
    if preempted:
        agent.on_post = lambda key, _: worker.post(ev.PrefillReleased(key, "preempted"))
        worker.release_preempted([t.key])
        worker.begin(StepNews(closed=[ClosePrefill(t.key, held=True, failed=False)]))
        assert agent.kinds[2:] == [GiveUp]
        assert worker.results() == Results(sent={"r"})
    else:
        worker.begin(StepNews(closed=[ClosePrefill(t.key, held=True, failed=False)]))
        assert agent.posted[2:] == [(t.key, ev.Sampled(Seeds(first_token=7), False, {}))]


@pytest.mark.parametrize(
    ("more", "counts", "expected"),
    [
        # After the first idle step, vLLM on a GPU may have the tokens of a step that computed something.
        ({}, [0, 1, 2, 2, 2, 3], [0.004] * 3),
        ({"alone": True}, [1, 2, 3, 3, 4, 5], [0.004] * 5),
    ],
    ids=["several workers", "one worker"],
)
def test_which_idle_steps_wait_and_how_long(
    more: dict[str, Any], counts: list[int], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(RecordingAgent(), **more)
    waits: list[float] = []

    class Events(queue.SimpleQueue[ev.HandoffEvent]):
        def get(self, block: bool = True, timeout: float | None = None) -> ev.HandoffEvent:
            if timeout is not None:
                waits.append(timeout)
            raise queue.Empty

    monkeypatch.setattr(worker, "_events", Events())
    worker.results(idle=True)
    worker.results()
    assert waits == [], "no leg waits"
    worker.begin(StepNews(opened=[OpenPrefill("r", ticket(), 99, 7)]))
    found = []
    for idle in (True, True, True, False, True, True):
        worker.results(idle)
        found.append(len(waits))
    assert found == counts
    assert waits == expected


class Arrivals(threading.Condition):
    """Notes how long a step would wait; `comes` is called meanwhile."""

    def __init__(self, lock: Any, comes: Callable[[], None]) -> None:
        super().__init__(lock)
        self.comes = comes
        self.waits: list[float | None] = []
        self.num_notified = 0

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        if found := predicate():
            return found
        self.waits.append(timeout)
        self.release()
        self.comes()
        self.acquire()
        return predicate()

    def notify(self, n: int = 1) -> None:
        self.num_notified += n


@pytest.mark.parametrize(("parked", "seconds"), [(True, 0.1), (False, 0.004)])
@pytest.mark.parametrize("comes", ["request", "event", "nothing"])
def test_what_ends_the_wait_of_a_step_without_work(comes: str, parked: bool, seconds: float) -> None:
    t = ticket()
    requests: queue.Queue[Any] = queue.Queue()
    worker = make_worker(RecordingAgent(), alone=True, requests=requests)

    def come() -> None:
        if comes == "request":
            requests.put("a request")
        elif comes == "event":
            worker.post(ev.PrefillReleased(t.key, "committed"))

    requests.not_empty = arrivals = Arrivals(requests.mutex, come)
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7)]))
    worker.begin(StepNews(closed=[ClosePrefill(t.key, held=True, failed=True)]))
    assert worker.results(idle=True, parked=parked).sent == ({"r"} if comes == "event" else set())
    assert arrivals.waits == [seconds]
    assert arrivals.num_notified == (comes != "nothing")
    worker.results(idle=True, parked=parked)
    assert len(arrivals.waits) == (2 if comes == "nothing" else 1), "no leg waits, or the request does"


@pytest.mark.parametrize("released_first", [True, False])
def test_held_blocks_are_reported_once_and_after_both_ends(worker: WorkerSide, released_first: bool) -> None:
    t = ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7)]))
    close = StepNews(closed=[ClosePrefill(t.key, held=True, failed=False)])
    if released_first:
        worker.post(ev.PrefillReleased(t.key, "committed"))
        assert worker.results() == Results()
        worker.begin(close)
    else:
        worker.begin(close)
        assert worker.results() == Results()
        worker.post(ev.PrefillReleased(t.key, "committed"))
    assert worker.results() == Results(sent={"r"})
    assert worker.results() == Results()


def test_blocks_that_vllm_frees_itself_are_not_reported(worker: WorkerSide, agent: RecordingAgent) -> None:
    t = ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7)], closed=[ClosePrefill(t.key, held=False, failed=True)]))
    assert agent.posted[-1] == (t.key, GiveUp("aborted"))
    worker.post(ev.PrefillReleased(t.key, "aborted"))
    assert worker.results() == Results()


def test_a_receive_that_brings_everything(worker: WorkerSide, agent: RecordingAgent) -> None:
    t = ticket()
    receive(worker, OpenDecode("r", t, 99, 32, ([4, 5, 6, 7],), parked=True))
    assert agent.posted == [
        (t.key, DecodeLeg(t)),
        (t.key, DecodePages(t, 99, both(Interval(32, 99)), both([4, 5, 6, 7]))),
    ]
    assert worker.results() == Results()
    worker.post(ev.DecodeCommitted(t.key, Seeds(first_token=7), 100, 2))
    assert worker.results() == Results(received={"r"})
    assert (worker.counts["committed"], worker.counts["bytes"]) == (1, 100)


def test_a_failed_receive_is_reported_when_its_pages_are_quiet(worker: WorkerSide) -> None:
    t = ticket()
    receive(worker, OpenDecode("r", t, 99, 0, ([4, 5, 6, 7],), parked=True))
    worker.post(ev.DecodeFailed(t.key, "peer_lost", "", recoverable=True))
    assert worker.results() == Results()
    worker.post(ev.DecodeReleased(t.key))
    assert worker.results() == Results(received={"r"}, failed={"r"})


def test_another_prompts_tokens_are_a_failed_receive(worker: WorkerSide) -> None:
    t = ticket()
    receive(worker, OpenDecode("r", t, 99, 0, ([4, 5, 6, 7],), parked=True))
    worker.post(ev.DecodeCommitted(t.key, Seeds(first_token=8), 100, 2))
    assert worker.results() == Results(received={"r"}, failed={"r"})


def test_a_receive_that_nobody_waits_for(worker: WorkerSide, agent: RecordingAgent) -> None:
    t = ticket()
    receive(worker, OpenDecode("r", t, 99, 99, ([4, 5, 6, 7],), parked=False))
    assert agent.posted == [
        (t.key, DecodeLeg(t)),
        (t.key, DecodePages(t, 99, both(Interval(0, 0)), both([4, 5, 6, 7]))),
    ]
    worker.post(ev.DecodeCommitted(t.key, Seeds(first_token=7), 0, 0))
    assert worker.results() == Results()


def test_a_prefill_leg_that_is_turned_away_is_called_off(worker: WorkerSide, agent: RecordingAgent) -> None:
    t = ticket()
    worker.begin(StepNews(turned_away=[t]))
    assert agent.posted == [(t.key, PrefillLeg(t)), (t.key, GiveUp("refused"))]
    worker.post(ev.PrefillReleased(t.key, "refused"))
    assert worker.results() == Results()


def test_a_decode_leg_waits_until_it_is_admitted(worker: WorkerSide, agent: RecordingAgent) -> None:
    t = ticket()
    worker.begin(StepNews(announced=[AnnounceDecode("r", t, 7)]))
    assert agent.posted == [(t.key, DecodeLeg(t))]
    worker.post(ev.DecodeAdmitted(t.key))
    assert worker.results() == Results()
    assert (worker.take_admitted(), worker.take_admitted()) == ({"r"}, set())
    worker.begin(StepNews(receives=[OpenDecode("r", t, 99, 32, ([4, 5, 6, 7],), parked=True)]))
    assert agent.posted[1:] == [(t.key, DecodePages(t, 99, both(Interval(32, 99)), both([4, 5, 6, 7])))]


@pytest.mark.parametrize("parked", [True, False])
def test_a_decode_leg_that_fails_before_it_has_blocks(worker: WorkerSide, agent: RecordingAgent, parked: bool) -> None:
    """vLLM handles it like other failed legs, but only once it has blocks."""
    t = ticket()
    worker.begin(StepNews(announced=[AnnounceDecode("r", t, 7)]))
    worker.post(ev.DecodeFailed(t.key, "peer_lost", "", recoverable=True))
    worker.post(ev.DecodeReleased(t.key))
    assert worker.results() == Results()
    assert worker.take_admitted() == {"r"}
    worker.begin(StepNews(receives=[OpenDecode("r", t, 99, 0, ([4, 5, 6, 7],), parked=parked)]))
    assert agent.posted == [(t.key, DecodeLeg(t))]
    assert worker.results() == (Results(received={"r"}, failed={"r"}) if parked else Results())
    assert (worker.counts["failed_peer_lost"], worker.counts["released"]) == (1, 1)


def test_ends_of_decode_legs(worker: WorkerSide, agent: RecordingAgent) -> None:
    t, waiting = ticket(), ticket()
    receive(worker, OpenDecode("r", t, 99, 0, ([4, 5, 6, 7],), parked=True))
    worker.begin(StepNews(announced=[AnnounceDecode("s", waiting, 7)], aborted=[waiting.key]))
    assert agent.posted[2:] == [(waiting.key, DecodeLeg(waiting)), (waiting.key, GiveUp("aborted"))]
    worker.begin(StepNews(aborted=[t.key]))
    assert agent.posted[-1] == (t.key, GiveUp("aborted"))
    worker.post(ev.DecodeReleased(t.key))
    worker.post(ev.DecodeReleased(waiting.key))
    assert worker.results().received == {"r"}
    num_calls = len(agent.posted)
    worker.begin(StepNews(aborted=[t.key, waiting.key]))
    assert len(agent.posted) == num_calls


def test_a_preemption_waits_for_the_agent_and_for_no_copy(worker: WorkerSide, agent: RecordingAgent) -> None:
    """A decode engine that hangs keeps copies from ending, but must not block this engine."""
    t, other = ticket(), ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7), OpenPrefill("s", other, 99, 7)]))
    worker.finalise([ComputedTokens(t.key, 40, ([1, 2],))])
    worker.release_preempted([t.key, ticket().key])
    worker.release_preempted([t.key])
    assert [key for key, event in agent.posted if isinstance(event, GiveUp)] == [t.key]
    # vLLM computes the request again, for itself, and gets no event about blocks that it took back.
    worker.finalise([ComputedTokens(other.key, 100, ([1, 2, 3, 4],))])
    worker.begin(StepNews(closed=[ClosePrefill(t.key, held=False, failed=True)]))
    assert worker.results() == Results()
    worker.post(ev.PrefillReleased(t.key, "preempted"))
    assert worker.results() == Results()
    assert worker.counts["prefill_preempted"] == 1
    assert agent.posted[-1] == (other.key, ev.Sampled(Seeds(first_token=7), False, {}))


def test_an_agent_that_does_not_answer_stops_the_engine(agent: RecordingAgent) -> None:
    worker, t = make_worker(agent, abort_timeout=0.2), ticket()
    worker.begin(StepNews(opened=[OpenPrefill("r", t, 99, 7)]))
    agent.hangs = True
    with pytest.raises(HandoffError, match="does not give up"):
        worker.release_preempted([t.key])
