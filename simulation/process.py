"""One incarnation of an engine process: its clock, its agent's loop around the real runner, its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from baton.handoff.channel.config import AgentConfig
from baton.handoff.node.node import HandoffNode
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.events import HandoffEvent
from baton.wire import LegRole
from simulation.calls import SimWorker, check_innocence
from simulation.engine import Engine
from simulation.memory import CellDigester, GroupMemory
from simulation.network import SimChannel
from simulation.transport import SimTransport

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.world import World

TICKET_KEY = b"simulated ticket key of 32 bytes"
_ENGINE_STEP = (0.002, 0.03)
_SLOW_ENGINE_STEP = (0.02, 0.6)
_AGENT_STEP = (0.0, 0.002)
_TICK = 0.001
_LOOK_S = 0.01
# As long as a real engine sleeps that has work and nothing to compute.
_LOOK_AGAIN_S = 0.5
_MAX_IDLE_TURNS = 20


class SimClock:
    """A process's clock: `rate` is how fast it runs, `start` what it said when the world began. `stepped` is how far
    its time of day was set forward or back, which the protocol must not look at.
    """

    def __init__(self, cluster: Cluster, rate: float, start: float) -> None:
        self.rate = rate
        self.stepped = 0.0
        self._world, self._start = cluster.world, start

    def monotonic(self) -> float:
        """See `Clock`."""
        return self._start + self._world.now * self.rate

    def read(self, age: float) -> float:
        """What it says now, as somebody thinks who has read it `age` seconds ago, and has a clock of rate 1."""
        return self._start + (self._world.now - age) * self.rate + age


class Process:
    """A prefill or decode engine, from its start to its death. Two loops run in it, as in the real one: the
    agent's (messages, copies, timers) and the engine's (requests), which meet in queues.
    """

    def __init__(self, cluster: Cluster, name: str, role: LegRole, address: str, generation: int) -> None:
        world, random = cluster.world, cluster.world.random
        self.world: World = world
        self.cluster, self.name, self.role, self.address = cluster, name, role, address
        self.uid = f"{name}#{generation}"
        skewed = world.settings.has("clock_rates")
        self.clock = SimClock(cluster, random.uniform(0.85, 1.15) if skewed else 1.0, random.uniform(100.0, 1e6))
        self.awake_since = world.now
        self.dead = self.paused = self.leaving = self.closed = False
        # A batch may take long, while the agent, a thread of its own, goes on.
        slow = world.settings.has("slow_engine") and random.random() < 0.5
        self._engine_pace = _SLOW_ENGINE_STEP if slow else _ENGINE_STEP
        full = world.settings.has("full_pools")
        self.memories: list[GroupMemory] = []
        for region, model in enumerate(world.settings.groups):
            size = 1 if model.kind == "state" else random.randint(1, 6)
            tokens = random.randint(45, 70) if full else random.randint(180, 300)
            if model.kind == "state":
                # Slots for a few requests, and for what may follow each.
                tokens = tokens // 6
            self.memories.append(GroupMemory(model, region, -(-tokens // size) + 1, size, random))
        self.region_sizes = [memory.nbytes for memory in self.memories]
        self.channel = SimChannel(self, cluster.network)
        self.transport = SimTransport(self, cluster.fabric)
        self.config = AgentConfig(
            engine_id=name,
            incarnation=self.uid,
            fingerprint={"model": "modelled"},
            ticket_key=TICKET_KEY,
            timers=world.settings.timers,
            integrity=world.settings.integrity,
            max_retries=0 if world.settings.recovery == "none" else 3,
        )
        geometries = {memory.model.name: memory.geometry for memory in self.memories}
        descriptor = self.transport.register([])
        digester = None if world.settings.integrity == "off" else CellDigester(self.memories)
        self.instance = Instance.of_one_rank(geometries)
        self.node: HandoffNode = HandoffNode(
            self.config,
            self.instance,
            self.transport,
            descriptor,
            self.channel,
            self._on_event,
            self.clock,
            digester,
            SimWorker(self),
            lambda key, peer: self.engine.agent.on_peer(key, peer),
        )
        self.engine: Engine = Engine(self)
        self.calls: deque[Callable[[], None]] = deque()
        self._next_wake = self._next_step = float("inf")
        self._idle_turns = 0
        self.resumed = 0.0  # by its monotonic clock
        self.blocked_on: Future[Any] | None = None  # its agent waits for a call to end

    @property
    def gone(self) -> bool:
        """Dead, or closed its transport."""
        return self.dead or self.closed

    # ------------------------------------------------------------ the agent's loop

    def wake(self, delay: float | None = None) -> None:
        """The agent's loop runs soon, or in `delay` seconds at the latest."""
        at = self.world.now + (self.world.random.uniform(*_AGENT_STEP) if delay is None else delay)
        if at < self._next_wake and not self.dead:
            self._next_wake = at
            self.world.after(at - self.world.now, self._woken, at)

    def _woken(self, at: float) -> None:
        if at != self._next_wake or self.dead or self.paused:
            return
        self._next_wake = float("inf")
        if self.blocked_on is not None and not self.blocked_on.done():
            self.wake(_LOOK_S)
            return
        self.agent_step()

    def agent_step(self) -> None:
        """What `HandoffAgent` does in one turn, in its order."""
        runner = self.node
        idle = not self.channel.routing and not self.calls and not len(runner.operations)
        silent = runner.sessions.expired(self.clock.monotonic())
        wait = runner.on_time()
        check_innocence(self, silent)
        routing, self.channel.routing = self.channel.routing, []
        for connection, message in routing:
            runner.on_message(connection, message)
        while self.calls:
            self.calls.popleft()()
        runner.poll()
        self.engine.agent_has_run()
        self._idle_turns = self._idle_turns + 1 if idle and wait < _TICK else 0
        if self._idle_turns > _MAX_IDLE_TURNS:
            self.world.fail("busy_loop", f"the agent of {self.name} has nothing to do, and does not sleep")
        # A sleep has the resolution of a real one, and lasts by this process's clock.
        self.wake(max(wait, _TICK) / self.clock.rate)

    def call(self, call: Callable[[], None]) -> None:
        """A call of the engine for the agent."""
        self.calls.append(call)
        self.wake()

    def _on_event(self, event: HandoffEvent) -> None:
        if self.world.tracing:
            self.world.note(self.name, f"agent says {type(event).__name__} {_brief(event)}")
        self.engine.agent.on_event(event)

    # ------------------------------------------------------------ the engine's loop

    def post(self, call: Callable[[], None]) -> None:
        """Something for the engine's next step."""
        self.engine.core.post(call)
        self.stir()

    def stir(self, delay: float | None = None) -> None:
        """The engine's loop runs soon, or in `delay` seconds at the latest."""
        if delay is None and self._next_step - self.world.now <= self._engine_pace[1]:
            return
        at = self.world.now + (self.world.random.uniform(*self._engine_pace) if delay is None else delay)
        if at < self._next_step and not self.dead:
            self._next_step = at
            self.world.after(at - self.world.now, self._engine_step, at)

    def _engine_step(self, at: float) -> None:
        """What `EngineCore.turn` does."""
        if at != self._next_step or self.dead or self.paused or self.engine.closed:
            return
        self._next_step = float("inf")
        core = self.engine.core
        core.drain()
        if core.step():
            self.stir()
        elif core.scheduler.has_work:
            self.stir(_LOOK_AGAIN_S)

    # ------------------------------------------------------------ one-sided access, checked

    def may_read(self, region: int, start: int, count: int, label: str) -> None:
        """A copy for attempt `label` reads cells here: they must be that attempt's, still."""
        memory = self.memories[region]
        for page in memory.pages_of(start, count) if not self.dead else ():
            self.engine.may_read(memory, page, label)

    def may_write(self, region: int, start: int, count: int, label: str) -> None:
        """A copy for attempt `label` writes cells here: their pages must be open to that attempt."""
        memory = self.memories[region]
        for page in memory.pages_of(start, count) if not self.dead else ():
            self.engine.may_write(memory, page, label)

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Listen, and let the router know after a while."""
        self.cluster.network.bind(self)
        self.wake()

    def crash(self) -> None:
        """Everything in it is gone at once."""
        self.dead = True
        self.world.note(self.name, f"{self.uid} is dead")
        self.cluster.network.unbind(self)
        self.cluster.fabric.died(self)
        for router in self.cluster.routers:
            router.process_died(self)
        for other in self.cluster.processes.values():
            other.wake()

    def pause(self) -> None:
        """Neither loop runs; what arrives is kept."""
        self.paused = True
        self.world.note(self.name, "is paused")

    def stop_for_a_while(self) -> None:
        """A fault: the process stops right after what it did last."""
        if not self.dead and not self.paused:
            self.pause()
            self.world.after(self.world.random.uniform(0.5, 12.0), self.resume)

    def resume(self) -> None:
        """Go on as if nothing had happened."""
        if self.dead or not self.paused:
            return
        self.paused = False
        self.resumed = self.clock.monotonic()
        self.awake_since = self.world.now
        self.world.note(self.name, "goes on")
        self.transport.resume()
        self._next_wake = self._next_step = float("inf")
        self.wake()
        self.stir()

    def leave(self) -> None:
        """Close as `HandoffAgent.close` does: give up, wait a bounded time for copies, say BYE, and end."""
        if self.dead or self.leaving:
            return
        self.leaving = True
        self.world.note(self.name, "leaves")
        self.engine.close()
        self.node.abort_all("engine_closed")
        self._leave(self.world.now + self.config.timers.close)

    def _leave(self, until: float) -> None:
        if self.dead:
            return
        if self.paused or (len(self.node.operations) and self.world.now < until):
            self.world.after(0.05, self._leave, until)
            return
        self.node.sessions.say_bye("engine_closed", quiet=len(self.node.operations) == 0)
        self.transport.close()
        self.closed = True
        self.crash()


def _brief(event: HandoffEvent) -> str:
    key = str(event.key)
    names = [name for name in event.__slots__ if name != "key"]
    return f"{key[:6]}{key[32:]} " + " ".join(f"{name}={getattr(event, name)}" for name in names)
