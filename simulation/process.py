"""One incarnation of an engine: its clock, its engine loop, its ranks, and its start and end."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.session.config import AgentConfig
from baton.kv.geometry import BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD
from baton.kv.moved_prefix import prefix_multiple
from baton.wire import EngineInfo, LegRole
from simulation.engine import Engine
from simulation.modelled.memory import GroupMemory, RankMemory
from simulation.rank import Rank
from simulation.story import MODEL, VOCAB, Model
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.world import World

TICKET_KEY = b"simulated ticket key of 32 bytes"
_ENGINE_STEP = (0.002, 0.03)
_SLOW_ENGINE_STEP = (0.02, 0.6)
# As long as a real engine sleeps if it has work but nothing to compute.
_LOOK_AGAIN_S = 0.5


# Other weights, other end tokens, and a shorter context.
_OTHERS: tuple[tuple[Model, int | None], ...] = ((Model(2), None), (Model(1, (0, 5)), None), (MODEL, 12))


class Ended(BaseException):
    """The process ended during a forward. A BaseException, so that no `except Exception` of the engine catches it."""


class SimClock:
    """A process's clock: `rate` is its speed, `start` its value when the world began. `stepped` is how far its time of
    day was set forward or back, which must not affect the protocol.
    """

    def __init__(self, cluster: Cluster, rate: float, start: float) -> None:
        self.rate = rate
        self.stepped = 0.0
        self._world, self._start = cluster.world, start

    def monotonic(self) -> float:
        return self._start + self._world.now * self.rate

    def read(self, age: float) -> float:
        """Its value now, as estimated by a peer that read it `age` seconds ago and has a clock of rate 1."""
        return self._start + (self._world.now - age) * self.rate + age


class Process:
    """A prefill or decode engine, from start to death: the loop of its requests and those of its ranks' agents,
    connected by queues. All ranks pause and die with it.
    """

    def __init__(
        self, cluster: Cluster, name: str, role: LegRole, address: str, generation: int, other: bool = False
    ) -> None:
        """`other`: started with other settings than the engines before it."""
        world, random = cluster.world, cluster.world.random
        self.model, self.context = MODEL, None
        if other:
            self.model, self.context = random.choice(_OTHERS)
        self.world: World = world
        self.cluster, self.name, self.role, self.address = cluster, name, role, address
        self.uid = f"{name}#{generation}"
        skewed = world.settings.has("clock_rates")
        self.clock = SimClock(cluster, random.uniform(0.85, 1.15) if skewed else 1.0, random.uniform(100.0, 1e6))
        self.awake_since = world.now
        self.dead = self.paused = self.leaving = self.closed = False
        self.resumed = 0.0  # by its monotonic clock
        self.paused_at = self.died_at = 0.0
        # A batch may take long while the agent, on its own thread, goes on.
        slow = world.settings.has("slow_engine") and random.random() < 0.5
        self._engine_pace = _SLOW_ENGINE_STEP if slow else _ENGINE_STEP
        self._next_step = float("inf")
        self.config = AgentConfig(
            engine_id=name,
            incarnation=self.uid,
            fingerprint=self.model.facts,
            ticket_key=TICKET_KEY,
            timers=world.settings.timers,
            integrity=world.settings.integrity,
            max_retries=0 if world.settings.recovery == "none" else 3,
        )
        self.memories = self._allocate()
        groups = {
            memory.model.name: [RankGeometry(rank=i, geometry=part.geometry) for i, part in memory.ranks.items()]
            for memory in self.memories
        }
        tp, stages = self.shape
        instances = [Instance(rank=number, groups=groups, sampling=tp * (stages - 1)) for number in range(tp * stages)]
        # One rank of an engine with several may be slower than the others all the time.
        late = random.randrange(tp * stages) if world.settings.has("slow_rank") and tp * stages > 1 else None
        self.ranks = [
            Rank(
                self,
                instance,
                [memory.ranks[instance.rank] for memory in self.memories if instance.rank in memory.ranks],
                slow=instance.rank == late,
            )
            for instance in instances
        ]
        self.engine: Engine = Engine(self, instances[0])

    def _allocate(self) -> list[GroupMemory]:
        settings, random = self.world.settings, self.world.random
        tp, stages = self.shape = random.choice(settings.shapes)
        memories: list[GroupMemory] = []
        regions = [0] * (tp * stages)
        for model in settings.groups:
            size = 1 if model.kind == "state" else random.randint(1, 6)
            tokens = random.randint(45, 70) if settings.has("full_pools") else random.randint(180, 300)
            if model.kind == "state":
                # Slots for a few requests, each with scratch slots.
                tokens = tokens // 6
            num_pages = -(-tokens // size) + 1
            order = random.choice((BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD))
            parts: dict[int, RankMemory] = {}
            for rank in range(tp * stages):
                stage, shard = divmod(rank, tp)
                # A drafter's layers are all on the last stage, in some engines on one rank of it.
                draft = model.owner == "draft"
                alone = draft and settings.draft_alone
                if draft and (stage + 1 < stages or (alone and shard)):
                    continue
                each = settings.num_heads // (1 if alone else tp)
                width = settings.num_layers // (1 if draft else stages)
                first = 0 if draft else stage * width
                heads, layers = range(each * shard, each * (shard + 1)), range(first, first + width)
                parts[rank] = RankMemory(model, regions[rank], num_pages, size, order, heads, layers)
                regions[rank] += 1
            memories.append(GroupMemory(model, num_pages, size, parts))
        return memories

    def info(self) -> EngineInfo:
        return EngineInfo(
            engine_id=self.name,
            incarnation=self.uid,
            control_addresses=[rank.address for rank in self.ranks],
            fingerprint=json.dumps(self.config.fingerprint, sort_keys=True),
            vocab_size=VOCAB,
            eos_token_ids=list(self.model.eos),
            num_speculative_tokens=self.world.settings.num_drafts,
            clock=self.clock.monotonic(),
            role=self.role,
            model="modelled",
            model_path="",
            max_model_len=self.engine.longest,
            kv_tokens=min(memory.num_pages * memory.page_size for memory in self.memories),
            prefix_step=1,
            prefix_multiple=prefix_multiple(self.engine.cache),
            max_num_seqs=self.engine.scheduler.max_num_seqs if self.world.settings.tells_seqs else 0,
            batch_invariant=True,
        )

    @property
    def gone(self) -> bool:
        """Dead, or its transport is closed."""
        return self.dead or self.closed

    def wake(self) -> None:
        for rank in self.ranks:
            rank.wake()

    # ------------------------------------------------------------ the engine's loop

    def post(self, call: Callable[[], None]) -> None:
        self.engine.core.post(call)
        self.stir()

    def stir(self, delay: float | None = None) -> None:
        """Run the engine's loop soon, or after at most `delay` seconds."""
        if delay is None and self._next_step - self.world.now <= self._engine_pace[1]:
            return
        at = self.world.now + (self.world.random.uniform(*self._engine_pace) if delay is None else delay)
        if at < self._next_step and not self.dead:
            self._next_step = at
            self.world.after(at - self.world.now, self._engine_step, at)

    def _engine_step(self, at: float) -> None:
        """As `EngineCore.turn`."""
        if at != self._next_step or self.dead or self.paused or self.engine.closed:
            return
        self._next_step = float("inf")
        if self.world.computing is self:
            return  # another step follows the current one
        core = self.engine.core
        core.drain()
        try:
            computed = core.step()
        except Ended:
            return
        if computed:
            self.stir()
        elif core.scheduler.has_work:
            self.stir(_LOOK_AGAIN_S)

    def compute(self, share: float) -> None:
        """Let the time of a share of a forward pass, while everything else runs, this process's agents included.
        Forwards of other engines take no time meanwhile. Raises `Ended`.
        """
        world = self.world
        if world.computing is not None:
            return
        world.computing = self
        try:
            world.run_for(world.random.uniform(*self._engine_pace) * share)
            while self.paused and not self.dead:
                world.step()
        except Exception as error:
            world.violation = world.violation or Violation("exception", f"{type(error).__name__}: {error}")
            world.note("!", traceback.format_exc())
            raise Ended from error
        finally:
            world.computing = None
        if self.dead or self.engine.closed:
            raise Ended

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        for rank in self.ranks:
            self.cluster.network.bind(rank)
        self.wake()

    def crash(self) -> None:
        self.dead, self.died_at = True, self.world.now
        self.world.note(self.name, f"{self.uid} is dead")
        for rank in self.ranks:
            self.cluster.network.unbind(rank)
            self.cluster.fabric.died(rank)
        for stream in self.cluster.streams:
            if stream.process is self:
                stream.cut(0.0, self.world.random.uniform(0.0, 0.5))
        for other in self.cluster.processes.values():
            other.wake()

    def pause(self) -> None:
        """Stop both loops; arriving messages are kept."""
        self.paused, self.paused_at = True, self.world.now
        self.world.note(self.name, "is paused")

    def stop_for_a_while(self) -> None:
        """A fault: pause right after the last action."""
        if not self.dead and not self.paused:
            self.pause()
            self.world.after(self.world.random.uniform(0.5, 12.0), self.resume)

    def resume(self) -> None:
        if self.dead or not self.paused:
            return
        self.paused = False
        self.was_away()
        self.world.note(self.name, "goes on")
        self._next_step = float("inf")
        for rank in self.ranks:
            rank.transport.resume()
            rank.next_wake = float("inf")
        self.wake()
        self.stir()

    def was_away(self) -> None:
        """The engine, with its living ranks, runs again from now on."""
        self.resumed, self.awake_since = self.clock.monotonic(), self.world.now

    @property
    def whole(self) -> bool:
        """Whether all its ranks are alive and running."""
        return not any(rank.dead or rank.paused for rank in self.ranks)

    def leave(self) -> None:
        """Close as `HandoffAgent.close` does: abort, wait a bounded time for copies, send BYE, and end."""
        if self.dead or self.leaving:
            return
        self.leaving = True
        self.world.note(self.name, "leaves")
        self.engine.close()
        for rank in self.ranks:
            rank.handoffs.abort_all()
        self._leave(self.world.now + self.config.timers.close)

    def _leave(self, until: float) -> None:
        if self.dead:
            return
        living = [rank for rank in self.ranks if not rank.dead]
        copying = sum(len(rank.handoffs.operations) for rank in living)
        if self.paused or (copying and self.world.now < until):
            self.world.after(0.05, self._leave, until)
            return
        for rank in living:
            rank.handoffs.sessions.say_bye("engine_closed", quiet=len(rank.handoffs.operations) == 0)
            rank.transport.close()
        self.closed = True
        self.crash()
