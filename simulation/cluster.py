"""The modelled deployment: engines that start and stop, routers, the network and transport between them, and faults."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from baton.handoff.protocol.messages import AttemptKey, Register, Seeds
from baton.kv.interval import Interval
from baton.openai import backend as planned_by
from baton.wire import LegRole
from simulation.legs import Stream
from simulation.modelled.network import Network
from simulation.modelled.squatter import Squatter
from simulation.modelled.stranger import Stranger
from simulation.modelled.transport import Fabric
from simulation.process import Process
from simulation.rank import Rank
from simulation.router import Request, Router
from simulation.story import Story
from simulation.world import World

# The module through which `baton.openai` computes identities; mutations patch it there.
_planned: Any = planned_by
# The share of forged claims that use the forger's own attempt.
_OWN_ATTEMPT = 0.5


class Cluster:
    """The state of one simulated deployment. `processes` holds the current incarnation of each engine, by
    engine name.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rungs: Counter[str] = Counter()
        self.seeds: dict[str, Seeds] = {}  # what each prefill sent, by attempt
        self.tickets: dict[AttemptKey, str] = {}  # all tickets that routers signed
        self.network = Network(world)
        self.stranger = Stranger(world, self.network)
        if world.settings.has("stranger"):
            self.network.overhear = self.stranger.overhear
        self.fabric = Fabric(world)
        self.processes: dict[str, Process] = {}
        self.by_uid: dict[str, Process] = {}
        self.ranks: dict[str, Rank] = {}  # of all incarnations, by uid
        self.streams: list[Stream] = []  # all legs that a router sent, also those that have not reached an engine
        self._waits: dict[tuple[str, AttemptKey], float] = {}  # when an attempt was first seen on a rank of D
        self.roles: dict[str, LegRole] = {f"P{i}": "prefill" for i in range(world.settings.num_prefill)}
        self.roles |= {f"D{i}": "decode" for i in range(world.settings.num_decode)}
        # A router starts the decode leg of engines on one host only after the first token.
        self._one_host = world.random.random() < 0.5
        self.routers: list[Router] = []
        for name in self.roles:
            self.start(name)
        self.routers += [Router(self) for _ in range(world.settings.num_routers)]

    def close(self) -> None:
        for router in self.routers:
            router.loop.end()

    @property
    def requests(self) -> list[Request]:
        return [request for router in self.routers for request in router.requests]

    def submit(self, request: Request) -> None:
        """Send a client's request to one of the routers, which do not know each other."""
        self.world.progress()
        self.world.random.choice(self.routers).submit(request)

    def check_deaths(self) -> None:
        """No leg waits for an engine that has been dead for longer than two leases, whatever listens at its address
        now.
        """
        timers, now = self.world.settings.timers, self.world.now
        longest = 2 * timers.lease + 2 * timers.check + 1.0
        for process in self.processes.values():
            if process.gone or process.paused or process.leaving or not process.whole:
                continue
            for rank in process.ranks:
                for key, attempt in rank.handoffs.runner.decodes.live.items():
                    far = self.by_uid[key.prefill_incarnation]
                    since = self._waits.setdefault((rank.uid, key), now)
                    since = max(since, far.died_at, process.awake_since)
                    if far.dead and not attempt.machine.closing and now - since > longest:
                        self.world.fail("waits_for_the_dead", f"{key} waits on {rank.uid} for {far.uid}")

    def url_of(self, name: str) -> str:
        if self._one_host:
            return f"http://host:{9000 + sorted(self.roles).index(name)}"
        return f"http://{name.lower()}:9000"

    def name_of(self, url: str) -> str:
        return next(name for name in self.roles if self.url_of(name) == url)

    def story(self, request: Request, identity: str | None) -> Story:
        """The correct tokens of a request for the model with this identity."""
        for process in self.by_uid.values():  # the first with this identity
            if _planned.token_identity(process.info().fingerprint) == identity:
                return Story(request.prompt, request.params, process.model)
        return Story(request.prompt, request.params)

    def start(self, name: str) -> Process:
        """Start a new incarnation of an engine at its old address."""
        generation = sum(process.name == name for process in self.by_uid.values())
        other = generation > 0 and self.world.settings.has("other_settings") and self.world.random.random() < 0.6
        process = Process(self, name, self.roles[name], f"sim://{name}", generation, other)
        self.processes[name] = self.by_uid[process.uid] = process
        self.ranks |= {rank.uid: rank for rank in process.ranks}
        process.start()
        return process

    def post_leg(self, stream: Stream, name: str) -> None:
        """The router's HTTP request for one leg arrives at an engine."""
        process = self.processes[name]
        if process.dead or process.leaving:
            stream.cut(0.0, 0.01)
            return
        stream.process = process
        process.post(lambda: self._take_leg(stream, process))

    def _take_leg(self, stream: Stream, process: Process) -> None:
        process.engine.serve(stream)
        if stream.gone:
            # The sender hung up while the request was on its way; the engine notices later.
            self.world.after(self.world.random.uniform(0.0, 0.5), stream.noticed)

    # ------------------------------------------------------------ faults

    def strike(self, kind: str) -> None:
        """Inject a fault of this kind at a random place."""
        world, random = self.world, self.world.random
        role: LegRole | None = "prefill" if "prefill" in kind else "decode" if "decode" in kind else None
        fit = [p for p in self.processes.values() if not p.gone and (role is None or p.role == role)]
        if kind.endswith("_router"):
            struck = self._strike_router(kind, random.choice(self.routers))
        elif kind == "squatter":
            struck = self._squat()
        elif kind == "partition":
            names = random.sample(sorted(self.roles), 2)
            pair = frozenset(names)
            world.note("net", f"{names} cannot reach each other")
            self.network.cut(pair)
            world.after(random.choice((0.5, 5.0, 12.0)) * random.random(), self._heal, pair)
            struck = True
        elif kind == "clock_step":
            stepped = random.choice(sorted(self.processes.values(), key=lambda process: process.name))
            stepped.clock.stepped += random.choice((-1.0, 1.0)) * random.choice((2.0, 60.0, 3600.0))
            world.note(stepped.name, f"its time of day is set {stepped.clock.stepped:+g} s off")
            struck = True
        elif kind == "broken_connection":
            struck = self.fabric.break_one()
        elif kind == "stranger":
            struck = self.stranger.repeat()
        elif kind == "forged_register":
            struck = self._forge()
        elif kind.endswith("_rank"):
            struck = self._strike_rank(kind, [p for p in fit if len(p.ranks) > 1 and p.whole and not p.leaving])
        elif not fit:
            struck = False
        else:
            struck = self._strike_process(kind, random.choice(fit))
        if struck:
            world.injected[kind] += 1

    def _strike_router(self, kind: str, router: Router) -> bool:
        """The router dies, pauses, or an operator makes it remove or drain an engine and add it again."""
        world, random = self.world, self.world.random
        if not router.up or router.loop.paused:
            return False
        if kind == "crash_router":
            router.crash()
            world.after(random.uniform(0.2, 4.0), router.restart)
        elif kind == "pause_router":
            world.note("router", "is paused")
            loop = router.loop
            loop.paused = True
            world.after(random.choice((0.3, 3.0, 10.0)) * random.random(), loop.resume)
        else:
            silent = [name for name, process in sorted(self.processes.items()) if process.paused and not process.dead]
            names = silent if silent and random.random() < 0.7 else sorted(self.roles)
            router.operate(random.choice(names), random.choice(("remove", "drain", "hurry")))
        return True

    def _squat(self) -> bool:
        """A squatter listens at the addresses of a dead engine."""
        dead = [process for _, process in sorted(self.processes.items()) if process.dead]
        free = [rank for process in dead for rank in process.ranks if rank.address not in self.network.bound]
        for rank in free:
            found: Any = Squatter(self.world, self.network, rank.address)
            self.network.bind(found)
        return bool(free)

    def _strike_process(self, kind: str, process: Process) -> bool:
        world, random = self.world, self.world.random
        if kind.startswith("crash"):
            process.crash()
            self._restart_later(process)
        elif kind.startswith("pause"):
            if process.paused:
                return False
            process.pause()
            world.after(random.choice((0.3, 3.0, 15.0)) * random.random(), process.resume)
        elif kind == "leave":
            process.leave()
            world.after(6.0, self._restart_later, process)
        else:
            return process.engine.fail_any()
        return True

    def _strike_rank(self, kind: str, fit: list[Process]) -> bool:
        """A fault of one rank of an engine with several. If the rank dies, its engine ends a little later."""
        world, random = self.world, self.world.random
        if not fit:
            return False
        process = random.choice(fit)
        rank = random.choice(process.ranks)
        if kind == "cut_rank":
            far = random.choice(sorted(name for name, role in self.roles.items() if role != process.role))
            world.note("net", f"{rank.uid} cannot reach {far}")
            pair = frozenset((rank.address, far))
            self.network.cut(pair)
            world.after(random.choice((0.5, 5.0, 12.0)) * random.random(), self._heal, pair)
        elif kind == "pause_rank":
            rank.pause()
            world.after(random.choice((0.3, 3.0, 15.0)) * random.random(), rank.resume)
        else:
            rank.crash()
            world.after(random.choice((0.05, 3.0)) * random.random(), self._end_with_its_rank, process)
        return True

    def _end_with_its_rank(self, process: Process) -> None:
        if not process.dead:
            process.crash()
            self._restart_later(process)

    def _forge(self) -> bool:
        """A decode engine claims the next attempt of another engine's transfer, or registers an attempt that it has
        announced, with a ticket for another attempt.
        """
        random = self.world.random
        attempts = [
            (process, attempt.machine.key)
            for process in self.processes.values()
            if process.role == "prefill" and not process.gone
            for attempt in process.ranks[0].handoffs.runner.prefills.live.values()
        ]
        forgers = [p for p in self.processes.values() if p.role == "decode" and not p.gone and not p.paused]
        if not attempts or not forgers:
            return False
        (victim, key), forger = random.choice(attempts), random.choice(forgers)
        session = forger.ranks[0].handoffs.sessions.servers.get(victim.address)
        if session is None or not session.ready:
            return False
        claimed = AttemptKey(key.transfer_id, key.attempt + 1, key.prefill_incarnation, forger.uid)
        # A separate generator, so that the seed's other draws do not depend on it.
        fork, prefills = Random(self.world.now), victim.ranks[0].handoffs.runner.prefills
        own = [k for k, known in prefills.live.items() if known.machine.claimed and k.decode_incarnation == forger.uid]
        if own and fork.random() < _OWN_ATTEMPT:
            claimed = fork.choice(own)
        ticket = random.choice(sorted(self.tickets.values()))
        if self.tickets.get(claimed) == ticket:
            return False  # no forgery: attempt, ticket and pages are the forger's own
        groups = {memory.model.name: memory for memory in forger.memories}
        forger.ranks[0].channel.send(
            session.connection,
            Register(claimed, ticket, dict.fromkeys(groups, Interval(0, 1)), {group: [1] for group in groups}),
        )
        return True

    def _restart_later(self, process: Process) -> None:
        if self.world.random.random() < 0.75:
            self.world.after(self.world.random.uniform(0.0, 4.0), self._restart, process)

    def _restart(self, process: Process) -> None:
        if process.dead and self.processes[process.name] is process:
            self.start(process.name)

    def _heal(self, pair: frozenset[str]) -> None:
        self.network.heal([pair])
        self.world.note("net", f"{sorted(pair)} reach each other again")

    def calm_down(self) -> None:
        """End all faults: paused processes resume, and cut connections heal."""
        self.world.calm = True
        self.world.note("", "faults end")
        self.network.heal()
        for router in self.routers:
            router.loop.resume()
        for process in self.processes.values():
            process.resume()
            for rank in process.ranks:
                rank.resume()
