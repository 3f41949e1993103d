"""One rank of an engine: its share of the memory, and its agent's loop around the real `RankHandoffs`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from baton.handoff.agent.rank_handoffs import RankHandoffs
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.events import HandoffEvent
from baton.handoff.protocol.messages import Cancelled, Commit, Confirm, Finished
from baton.handoff.session.config import AgentConfig
from baton.handoff.session.sessions import Sessions
from simulation.calls import SimWorker, check_innocence
from simulation.modelled.memory import CellDigester, RankMemory
from simulation.modelled.network import SimChannel
from simulation.modelled.transport import SimTransport

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World

_AGENT_STEP = (0.0, 0.002)
_SLOW_AGENT_STEP = (0.01, 0.3)
_TICK = 0.001
_LOOK_S = 0.01
_SLOW_WORK = (0.01, 0.5)
_MAX_IDLE_TURNS = 20


class RankClock:
    """The process's clock as the agent reads it, including time spent in the current turn."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def monotonic(self) -> float:
        return self._rank.process.clock.monotonic() + self._rank.spent * self.rate

    @property
    def rate(self) -> float:
        return self._rank.process.clock.rate

    @property
    def stepped(self) -> float:
        return self._rank.process.clock.stepped


class Rank:
    """One rank with its own handoffs, channel and transport. It dies with its engine, and may pause or die alone."""

    def __init__(
        self, process: Process, instance: Instance, memories: Sequence[RankMemory], *, slow: bool = False
    ) -> None:
        self.process, self.memories, self.slow = process, memories, slow
        self.world: World = process.world
        self.cluster, self.name, self.clock = process.cluster, process.name, RankClock(self)
        self.config: AgentConfig = process.config
        suffix = f".{instance.rank}" if instance.rank else ""
        self.uid: str = process.uid + suffix
        self.address: str = process.address + suffix
        self.region_sizes = [memory.nbytes for memory in memories]
        self.channel = SimChannel(self, self.cluster.network)
        self.transport = SimTransport(self, self.cluster.fabric)
        descriptor = self.transport.register([])
        self.handoffs: RankHandoffs = RankHandoffs(
            Sessions(self.config, instance, self.transport, descriptor, self.channel, self.clock, gathered=True),
            instance,
            self.transport,
            self._on_event,
            None if self.config.integrity == "off" else CellDigester(memories),
            SimWorker(self),
            lambda key, peer: process.engine.agent.on_peer(key, peer),
        )
        self.calls: deque[Callable[[], None]] = deque()
        self.next_wake = float("inf")
        self.spent = 0.0  # in the current turn
        self._free_at = 0.0  # when the last turn ends
        self._idle_turns = 0
        self.blocked_on: Future[Any] | None = None  # a call that the agent waits for
        self._dead = self._paused = False
        self._pace = _SLOW_AGENT_STEP if slow else _AGENT_STEP

    @property
    def dead(self) -> bool:
        return self._dead or self.process.dead

    @property
    def paused(self) -> bool:
        return self._paused or self.process.paused

    @property
    def gone(self) -> bool:
        return self._dead or self.process.gone

    # ------------------------------------------------------------ faults of one rank

    def crash(self) -> None:
        """Die; the engine lives on until it notices."""
        self._dead = True
        self.world.note(self.name, f"rank {self.uid} is dead")
        self.cluster.network.unbind(self)
        self.cluster.fabric.died(self)
        for other in self.cluster.processes.values():
            other.wake()

    def pause(self) -> None:
        """Stop the loop and the copies; arriving messages are kept."""
        self._paused = True
        self.world.note(self.name, f"rank {self.uid} is paused")

    def resume(self) -> None:
        if self._paused and not self.dead:
            self._paused = False
            self.world.note(self.name, f"rank {self.uid} goes on")
            self.process.was_away()
            self.transport.resume()
            self.next_wake = float("inf")
            self.wake()

    # ------------------------------------------------------------ the agent's loop

    def wake(self, delay: float | None = None) -> None:
        """Run the agent's loop soon, or after at most `delay` seconds."""
        at = self.world.now + (self.world.random.uniform(*self._pace) if delay is None else delay)
        at = max(at, self._free_at)
        if at < self.next_wake and not self.dead:
            self.next_wake = at
            self.world.after(at - self.world.now, self._woken, at)

    def _woken(self, at: float) -> None:
        if at != self.next_wake or self.dead or self.paused:
            return
        self.next_wake = float("inf")
        if self.blocked_on is not None and not self.blocked_on.done():
            self.wake(_LOOK_S)
            return
        if self.channel.unread and self.world.hit("slow_turn"):
            self.wake(self.world.random.uniform(*_SLOW_AGENT_STEP))
            return
        self.agent_step()

    def agent_step(self) -> None:
        """One turn of `HandoffAgent`, in the same order."""
        handoffs = self.handoffs
        idle = not self.channel.unread and not self.calls and not len(handoffs.operations)
        silent = handoffs.sessions.expired(self.clock.monotonic())
        wait = handoffs.run_timers()
        check_innocence(self, silent)
        for connection, message in self.channel.receive(0.0):
            self._works()
            handoffs.on_message(connection, message)
        while self.calls:
            self._works()
            self.calls.popleft()()
        handoffs.poll()
        if handoffs.runner.undefined is not None:
            self.world.fail("undefined_transition", f"{self.name}: {handoffs.runner.undefined}")
        self.process.engine.agent_has_run()
        self._idle_turns = self._idle_turns + 1 if idle and wait < _TICK else 0
        if self._idle_turns > _MAX_IDLE_TURNS:
            self.world.fail("busy_loop", f"the agent of {self.name} has nothing to do, and does not sleep")
        # A sleep has the resolution of a real one, and lasts by this process's clock.
        self._free_at = self.world.now + self.spent
        self.wake(self.spent + max(wait, _TICK) / self.clock.rate)
        self.spent = 0.0

    def _works(self) -> None:
        """Handling the next message or call takes time, in which this agent receives nothing."""
        if self.world.hit("slow_work"):
            self.spent = min(self.spent + self.world.random.uniform(*_SLOW_WORK), self.config.timers.lease / 3)

    def call(self, call: Callable[[], None], soon: Callable[[], bool] = lambda: True) -> None:
        """Queue a call of the engine for the agent, which wakes for it if `soon()`."""
        self.calls.append(call)
        if soon():
            self.wake()

    def _on_event(self, event: HandoffEvent) -> None:
        if self.world.tracing:
            self.world.note(self.name, f"agent says {type(event).__name__} {_brief(event)}")
        self.process.engine.agent.on_event(event)

    # ------------------------------------------------------------ one-sided access, checked

    def may_read(self, region: int, start: int, count: int, label: str) -> None:
        """A copy for attempt `label` reads cells here: their pages must still be held by that attempt."""
        memory = self.memories[region]
        for page in memory.pages_of(start, count) if not self.dead else ():
            self.process.engine.may_read(memory.spec.name, page, label)

    def may_write(self, region: int, start: int, count: int, label: str) -> None:
        """A copy for attempt `label` writes cells here: their pages must be open to that attempt."""
        memory = self.memories[region]
        for page in memory.pages_of(start, count) if not self.dead else ():
            self.process.engine.may_write(memory.spec.name, page, label)

    def vouches(self, message: Cancelled | Commit | Confirm | Finished) -> None:
        """Check a message by which the peer may free or trust pages, before it is sent."""
        key = message.key
        if isinstance(message, Confirm):
            if str(key.of_pair((0, 0))) in self.process.engine.quiet:
                self.world.fail("false_confirm", f"{self.name} confirms {key}, whose pages it has let go of")
            return
        pending = [copy.tag for copy in self.transport.pending if copy.attempt == str(key) and not copy.harmless]
        if pending:
            kind = type(message).__name__.upper()
            self.world.fail("false_quiet", f"{self.name} says {kind} of {key} while {pending} go on")


def _brief(event: HandoffEvent) -> str:
    key = str(event.key)
    names = [name for name in event.__slots__ if name != "key"]
    return f"{key[:6]}{key[32:]} " + " ".join(f"{name}={getattr(event, name)}" for name in names)
