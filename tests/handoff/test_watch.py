"""If an agent's thread ends or hangs, its engine is told once and ends; closing the agent does not block."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.config import KVTransferConfig
from baton.errors import ConfigError, HandoffError
from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.agent.thread_watch import ThreadWatch
from baton.handoff.session.config import Timers
from testkit.engines import stepped
from testkit.handoffs.ranks import Engine, Shape, begin_one
from testkit.inside import rank_handoffs_of, thread_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def running() -> Iterator[threading.Thread]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    yield thread
    end.set()
    thread.join()


def watched(thread: threading.Thread, clock: Clock, turned: list[float]) -> ThreadWatch:
    return ThreadWatch(thread, lambda: turned[0], 8.0, print, clock)


def look_for(watch: ThreadWatch, clock: Clock, seconds: float) -> str | None:
    until, why = clock.now + seconds, None
    while clock.now < until and why is None:
        clock.now += 1.0
        why = watch.check()
    return why


def test_a_thread_that_comes_round_is_not_lost_and_one_that_does_not_is(running: threading.Thread) -> None:
    clock, turned = Clock(), [100.0]
    watch = watched(running, clock, turned)
    for _ in range(40):
        clock.now += 1.0
        turned[0] = clock.now - 0.9
        assert watch.check() is None
    assert look_for(watch, clock, 7.0) is None
    assert look_for(watch, clock, 3.0) == "its thread has done nothing for 9 s"


def test_a_process_that_slept_does_not_blame_its_thread(running: threading.Thread) -> None:
    clock, turned = Clock(), [100.0]
    watch = watched(running, clock, turned)
    clock.now += 3600.0
    assert watch.check() is None
    assert look_for(watch, clock, 8.0) is None
    assert look_for(watch, clock, 2.0) is not None


def test_a_thread_that_has_ended_is_lost() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert watched(thread, Clock(), [100.0]).check() == "its thread has ended"


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="durations must be positive"):
        Timers(hang=0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["hangs", "has ended"])
def test_an_agent_that_is_lost_says_so_and_proves_nothing(how: str) -> None:
    told: queue.Queue[str] = queue.Queue()
    go_on = threading.Event()
    # Only the agent that is lost is told of, however long the others wait for a core.
    hang = {"P": 600.0, "D": 5.0 if how == "hangs" else 10.0}
    engines = [
        Engine(name, Shape(tp=2), ("local://",), {"timers": Timers(hang=hang_s), "on_lost": told.put})
        for name, hang_s in hang.items()
    ]
    p, d = engines
    try:
        begin_one(p, d)

        def hang() -> None:
            go_on.wait()

        def end() -> None:
            raise SystemExit

        d.ranks[1].agent._call(hang if how == "hangs" else end)
        why = told.get(timeout=60)
        assert ("done nothing" if how == "hangs" else "has ended") in why
        d.ranks[1].agent.close()  # does not wait for the thread
        d.ranks[0].agent.close()
        # Nothing can prove that the lost rank's pages are quiet.
        assert not [event for event in list(d.events.queue) if type(event).__name__ == "DecodeReleased"]
        assert told.empty()
    finally:
        go_on.set()
        thread_of(d.ranks[1].agent).join(60)
        for engine in engines:
            engine.close()


def test_the_agents_of_all_ranks_close_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("P", Shape(tp=2), ("local://",), {})
    first, second = (rank.agent for rank in engine.ranks)
    second_ends = threading.Event()
    monkeypatch.setattr(rank_handoffs_of(second), "abort_all", lambda: second_ends.set())
    heard: list[bool] = []
    first._call(lambda: heard.append(second_ends.wait(60)))
    HandoffAgent.close_all([first, second])
    engine.close()
    assert heard == [True]


def test_an_engine_whose_agent_is_lost_ends_with_the_cause(tmp_path: Path) -> None:
    transfer = KVTransferConfig(kv_transport="local://")
    settings = {"kv_transfer_config": transfer, "ticket_key_file": str(tmp_path / "key"), "kv_cache_memory": 1 << 20}
    with stepped(model="models/baton-demo-llama", role="prefill", engine_id="p", **settings) as one:
        assert one.engine.agent is not None
        one.engine.agent._watch._on_lost("its thread has ended")
        with pytest.raises(HandoffError, match="agent_lost: its thread has ended"):
            one.core.turn()
