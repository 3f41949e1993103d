"""Plays one seed: deployment, load, faults, and the final checks."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random

from baton.handoff.agent.attempts import TOMBSTONE_S
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S
from baton.sampling_params import SamplingParams
from simulation.cluster import Cluster
from simulation.engine import MAX_OUTPUT
from simulation.router import FIRST_WITH, Request, hands_back
from simulation.settings import FAULTS, TRAITS, Settings, draw
from simulation.story import LONGEST, LONGEST_SMALL, VOCAB, Story, prompts
from simulation.world import Violation, World

# Seconds after the last ticket's expiry within which everything must be at rest: a lease, a broken connection that is
# noticed late, repetitions, and the router's clock against the slowest engine's.
_REST_S = 25.0
_POLL_S = 0.5
# Without harmful faults some request progresses at least this often, in seconds: an engine's slowest step, a late leg,
# a repeated message.
_STILL_S = 6.0
# The share of next turns in seeds with hand-backs.
_NEXT_TURNS = 0.8


@dataclass(slots=True)
class Result:
    """The result of one seed. `violation` is None if every invariant held."""

    seed: int
    settings: Settings
    events: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)
    violation: Violation | None = None
    trace: list[str] = field(default_factory=list)


def run_seed(seed: int, faults: Collection[str] = FAULTS, tracing: bool = False) -> Result:
    """Play one schedule. The same seed and faults give the same result."""
    random = Random(seed)
    settings = draw(random, faults)
    if seed >= FIRST_WITH:
        # Sessions end while they are needed again. Of its own, so that no other draw depends on it.
        idle = Random(f"idle sessions in {seed}").choice((0.2, 2.0, 300.0))
        settings = replace(settings, timers=replace(settings.timers, idle=idle))
    world = World(seed, settings, random, tracing)
    world.note("", f"seed {seed}: {settings}")
    result = Result(seed, settings)
    cluster = Cluster(world)
    try:
        _play(world, cluster)
        _check_rest(world, cluster)
    except Violation as violation:
        result.violation = violation
    except Exception as error:
        # In a real engine this exception would have ended the thread.
        result.violation = world.violation or Violation("exception", f"{type(error).__name__}: {error}")
        world.note("!", f"VIOLATION {result.violation}\n{traceback.format_exc()}")
    cluster.close()
    result.events, result.injected, result.rungs, result.trace = (
        world.events,
        world.injected,
        cluster.rungs,
        world.trace,
    )
    for router in cluster.routers:
        result.rungs.update(router.backend.recovery.counts)
        for outcome, count in router.backend.hand_backs.counts.items():
            result.rungs[f"hand-back {outcome}"] += count
    result.rungs["preempt"] = sum(process.engine.scheduler.num_preemptions for process in cluster.by_uid.values())
    for trait in TRAITS:
        if settings.has(trait):
            result.injected[trait] += 1
    for request in cluster.requests:
        result.outcomes[_outcome(request)] += 1
    return result


def _outcome(request: Request) -> str:
    if request.outcome == "exact" and request.rungs:
        return "exact after " + "+".join(sorted(request.rungs))
    return request.outcome or "unfinished"


def _load(world: World, cluster: Cluster) -> float:
    """Schedule all requests. Returns the time by which each must have ended."""
    random, settings = world.random, world.settings
    count = settings.num_requests * (2 if settings.has("burst") else 1)
    longest = LONGEST_SMALL if settings.has("full_pools") else LONGEST  # each request must fit alone
    times, requests = list[float](), list[Request]()
    for index, prompt in enumerate(prompts(random, count)):
        times.append(random.uniform(0.0, 0.3 if settings.has("burst") else 6.0))
        requests.append(Request(index, prompt[:longest], _params(random), times[-1] + settings.patience))
    if hands_back(world.seed):
        _continue_chats(world.seed, times, requests, longest)
    for at, request in zip(times, requests, strict=True):
        request.deadline = at + settings.patience
        world.after(at, cluster.submit, request)
    return max(request.deadline for request in requests)


def _continue_chats(seed: int, times: list[float], requests: list[Request], longest: int) -> None:
    """Make many of the requests the next turns of others. They begin with an answer that only a decode engine has."""
    random = Random(f"turns in {seed}")  # of its own, so that no other draw depends on it
    for index in range(1, len(requests)):
        if random.random() < _NEXT_TURNS:
            before = random.randrange(max(0, index - 3), index)
            said = Story(requests[before].prompt, requests[before].params).tokens
            new = [random.randrange(1, VOCAB) for _ in range(random.randint(1, 6))]
            if len(said) < longest:
                requests[index].prompt = [*said, *new][:longest]
                times[index] = times[before] + random.choice((0.5, 1.5, 4.0)) * random.random()


def _params(random: Random) -> SamplingParams:
    """Greedy, sampled, or grammar-like parameters."""
    seed = random.randrange(1 << 63) if random.random() < 0.3 else None
    allowed = tuple(sorted(random.sample(range(VOCAB), random.randint(2, 9)))) if random.random() < 0.2 else None
    return SamplingParams(
        max_tokens=random.randint(1, MAX_OUTPUT),
        temperature=0.0 if seed is None else 1.0,
        seed=seed,
        allowed_token_ids=allowed,
    )


def _play(world: World, cluster: Cluster) -> None:
    """Run until everything is at rest, or its time limit is over."""
    latest = _load(world, cluster)
    world.after(latest, cluster.calm_down)
    watch = _Watch(world, cluster, latest + world.settings.life + world.settings.timers.handoff + _REST_S)
    world.watch = watch
    while not watch.over and world.step():
        pass


class _Watch:
    """Checks after each event, also during a forward. `over`: everything is at rest, which must be the case by
    `rest_by`.
    """

    def __init__(self, world: World, cluster: Cluster, rest_by: float) -> None:
        self._world, self._cluster, self._rest_by = world, cluster, rest_by
        self._strikes = list(world.settings.strikes)
        self._count = world.settings.num_requests * (2 if world.settings.has("burst") else 1)
        self._next_look = 0.0
        self.over = False

    def __call__(self) -> None:
        world, cluster, strikes = self._world, self._cluster, self._strikes
        while strikes and strikes[0][0] <= world.events:
            cluster.strike(strikes.pop(0)[1])
        if world.now < self._next_look:
            return
        self._next_look = world.now + _POLL_S
        for router in cluster.routers:
            router.check_leases()
        cluster.check_deaths()
        requests = cluster.requests
        waiting = [request.name for request in requests if not request.outcome]
        loops = [router.loop for router in cluster.routers]
        since = max(world.progressed, *(world.now if loop.paused else loop.resumed_at for loop in loops))
        if world.settings.harmless and waiting and world.now > since + _STILL_S:
            world.fail("no_progress", f"{waiting} wait, and nothing moves")
        if len(requests) == self._count and all(request.outcome for request in requests):
            if not world.calm:
                # Processes that were paused must first take in their messages.
                cluster.calm_down()
            elif _at_rest(cluster):
                self.over = True
                return
        if world.now > self._rest_by:
            world.fail("not_at_rest", "; ".join(_left(cluster)))


def _at_rest(cluster: Cluster) -> bool:
    return not _left(cluster)


def _left(cluster: Cluster) -> list[str]:
    """Requests, legs, pages, copies, claims and attempts that have not ended."""
    out = [f"{request.name} has not ended" for request in cluster.requests if not request.outcome]
    for router in cluster.routers:
        out += router.left()
    for process in cluster.processes.values():
        if process.dead:
            continue
        name = process.name
        engine = process.engine
        requests = [f"{request.request_id} {request.status.name}" for request in engine.core.requests.values()]
        if requests or engine.legs.open:
            out.append(f"{name} has requests {requests} and legs {[str(key) for key in engine.legs.open]}")
        for group, pool in engine.cache.pools.items():
            held = pool.num_referenced + pool.num_quarantined
            if held:
                out.append(f"{name} holds {held} pages of {group}")
        handoffs = [rank.handoffs for rank in process.ranks]
        live = [str(attempt.machine.key) for each in handoffs for attempt in each.runner.live()]
        copies = sum(len(each.operations) for each in handoffs)
        if live or copies:
            out.append(f"{name} has attempts {live} and {copies} copies")
        if any(rank.channel.may_begin for rank in process.ranks):
            # A process that was paused until now may begin something with these messages.
            out.append(f"{name} has messages to take in")
        if any(each.routing.registrations.holding for each in handoffs):
            # The claim's connection may be on its way to a process that died; a lease must have time to end it.
            out.append(f"{name} holds a claim back")
    return out


def _check_rest(world: World, cluster: Cluster) -> None:
    """At rest: every request ended well or with a named error; after all tickets expired, no attempt is remembered."""
    for request in cluster.requests:
        if world.settings.harmless and _outcome(request) != "exact":
            world.fail("needless_failure", f"{request.name} ended {_outcome(request)} without a fault that explains it")
    living = [process for process in cluster.processes.values() if not process.dead]
    ranks = [rank for process in living for rank in process.ranks]
    for rank in ranks:
        rank.agent_step()
    world.skip(MAX_TICKET_LIFE_S * 1.3)
    for rank in ranks:
        for _ in range(2):
            world.skip(1.3 * TOMBSTONE_S + 2 * world.settings.timers.retry)
            # A process that sleeps through a skip renews no lease.
            rank.process.awake_since = world.now
            rank.agent_step()
        tables = rank.handoffs.runner.prefills, rank.handoffs.runner.decodes
        kept = sum(len(table.ended) for table in tables) + rank.handoffs.routing.registrations.holding
        if kept:
            world.fail("memory", f"{rank.uid} remembers {kept} attempts after every ticket expired")
    for process in living:
        for group, pool in process.engine.cache.pools.items():
            total = pool.num_available + pool.num_referenced + pool.num_quarantined
            if total != pool.num_pages - 1:
                world.fail("memory", f"{process.name} has {total} of {pool.num_pages - 1} pages of {group}")
