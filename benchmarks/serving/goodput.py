"""Goodput under objectives for latency, by policy: the router's own choice over modelled engines, in virtual time.

    python -m benchmarks.serving.goodput [--requests 3000] [--speeds 2,3,4] [--policies round_robin,...]

The trace is that of `benchmarks.serving.trace`. Four prefill and four decode engines have the speeds of `Machine`:
they are assumptions, so figures are for comparing policies only. Routes, costs, charges, what the router believes of
caches and hand-backs are the router's code; engines, networks and caches are modelled, without faults.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from baton.router.connectors.base import ConnectorConfig
from baton.router.connectors.baton import EngineConnector
from baton.router.hand_back import HandBacks
from baton.router.index.held import PROMISED_S
from baton.router.pairs import Pairs
from baton.router.policies import PolicyConfig, create_policies
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import KnownPrefixes, PromptBlocks
from baton.router.routes import Route, Routes
from baton.sampling_params import SamplingParams
from baton.wire import EngineInfo, GenerateRequest, LegRole, Role
from benchmarks.serving.trace import TraceRequest, describe, make_trace

TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.04
HAND_BACK = "cache_aware + hand-back"
POLICIES = ("round_robin", "least_loaded", "power_of_two", "consistent_hash", "cache_aware", HAND_BACK)
_LOCAL = 64  # as `baton up` has it
_PAGE = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """An 8B model in bfloat16 with 128 KiB of KV per token on a GPU of 3.35 TB/s and 80 GB, and 50 GB/s between two."""

    prefill_s: float = 1 / 25_000  # per token
    step_s: float = 0.006  # of a decode step: 16 GB of weights, and launches
    kv_s: float = 131_072 / 3.35e12  # of a step, per token of KV
    move_s: float = 131_072 / 50e9  # per token
    latency_s: float = 0.004  # of a handoff or hand-back
    kv_tokens: int = 420_000
    max_num_seqs: int = 64


class Events:
    """Calls in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def run(self) -> None:
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


@dataclass(eq=False, slots=True)
class Job:
    request: TraceRequest
    prompt: PromptBlocks
    route: Route
    legs: ExitStack
    prefilled: list[Callable[[], None]]
    left: float = 0.0  # tokens to decode
    first_s: float = 0.0
    hit: int = 0  # of the engine that computes the prompt


class ModelledEngine:
    """Computes prompts one after the other, and decodes all requests at the same pace, which prompts interrupt."""

    def __init__(self, events: Events, machine: Machine) -> None:
        self._events, self._machine = events, machine
        self.cache = KnownPrefixes(_PAGE, machine.kv_tokens, lambda: 0.0, expiry_s=1.0)
        self.computed = 0
        self._prompts: deque[tuple[Job, Callable[[], None]]] = deque()
        self._computes = False
        self._waiting: deque[tuple[Job, Callable[[], None]]] = deque()
        self._running: dict[Job, Callable[[], None]] = {}
        self._since = 0.0
        self._version = 0

    # ------------------------------------------------------------ prompts

    def compute(self, job: Job, then: Callable[[], None]) -> None:
        self._prompts.append((job, then))
        if not self._computes:
            self._next_prompt()

    def _next_prompt(self) -> None:
        self._progress()
        self._computes = bool(self._prompts)
        self._plan()
        if not self._prompts:
            return
        job, then = self._prompts.popleft()
        job.hit = self.cache.num_tokens(job.prompt)
        lacking = len(job.prompt.tokens) - job.hit
        self.computed += lacking

        def ended() -> None:
            self.cache.learn(job.prompt)
            then()
            self._next_prompt()

        self._events.at(self._events.now + lacking * self._machine.prefill_s, ended)

    # ------------------------------------------------------------ decoding

    def decode(self, job: Job, then: Callable[[], None]) -> None:
        self._waiting.append((job, then))
        self._admit()

    def _admit(self) -> None:
        self._progress()
        while self._waiting and len(self._running) < self._machine.max_num_seqs:
            job, then = self._waiting[0]
            if self._running and self._kv() + job.request.num_tokens > self._machine.kv_tokens:
                break
            self._waiting.popleft()
            self._running[job] = then
        self._plan()

    def _kv(self) -> int:
        return sum(job.request.num_tokens for job in self._running)

    def _pace(self) -> float:
        return self._machine.step_s + self._machine.kv_s * self._kv()

    def _progress(self) -> None:
        elapsed, self._since = self._events.now - self._since, self._events.now
        if self._running and not self._computes:
            for job in self._running:
                job.left -= elapsed / self._pace()

    def _plan(self) -> None:
        self._version += 1
        if not self._running or self._computes:
            return
        version, least = self._version, min(job.left for job in self._running)
        self._events.at(self._events.now + max(0.0, least) * self._pace(), lambda: self._ended(version))

    def _ended(self, version: int) -> None:
        if version != self._version:
            return
        self._progress()
        for job in [job for job in self._running if job.left <= 1e-6]:
            then = self._running.pop(job)
            self.cache.learn(PromptBlocks(job.request.answered))
            then()
        self._admit()


class KnownByEvents:
    """What a router knows of an engine whose KV events arrive at once, and what it has just sent there."""

    def __init__(self, cache: KnownPrefixes, clock: Callable[[], float]) -> None:
        self._cache, self._promised = cache, KnownPrefixes(1, 0, clock, PROMISED_S)
        self.learns = True

    def num_tokens(self, prompt: PromptBlocks) -> int:
        return max(self._cache.num_tokens(prompt), self._promised.num_tokens(prompt))

    def learn(self, prompt: PromptBlocks) -> None:
        self._promised.learn(prompt)

    def forget(self, prompt: PromptBlocks) -> None:
        self._promised.forget(prompt)


class ModelledHandBacks(HandBacks):
    """Measures as the router does, in virtual time."""

    def moved(self, source: PooledEngine, destination: PooledEngine, seconds: float, num_tokens: int) -> None:
        self._pace_of(source, destination).measure(seconds, max(1, num_tokens))

    def has_computed(self, engine: PooledEngine, seconds: float, num_tokens: int) -> None:
        self._compute_pace(engine).measure(seconds, max(1, num_tokens))


@dataclass(slots=True)
class GoodputReport:
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    num_good: int = 0
    computed: int = 0
    asked: int = 0
    moved_back: int = 0

    def line(self, name: str, speed: float, duration_s: float) -> str:
        ttft, tpot = sorted(self.ttft_s), sorted(self.tpot_s)
        num = len(ttft)

        def at(values: list[float], share: float) -> float:
            return values[min(num - 1, int(num * share))] * 1e3

        return (
            f"| {name} | {speed:g} | {num / duration_s:.1f} | {self.num_good / duration_s:.2f} | "
            f"{self.num_good / num:.3f} | {at(ttft, 0.5):.0f}, {at(ttft, 0.9):.0f}, {at(ttft, 0.99):.0f} | "
            f"{at(tpot, 0.5):.1f}, {at(tpot, 0.99):.1f} | {self.computed / self.asked:.3f} | "
            f"{self.moved_back / self.asked:.3f} |"
        )


class Cluster:
    """The router's choice over modelled engines."""

    def __init__(
        self,
        policy: str,
        num_prefill: int,
        num_decode: int,
        machine: Machine,
        seed: int = 0,
        beside: Cluster | None = None,
        has_events: bool = False,
    ) -> None:
        """`beside`: another router over the same engines, of which this one knows nothing. `has_events`: it knows at
        once what engines hold, as by their KV events; otherwise it guesses from what it has sent them."""
        self.events: Events = Events() if beside is None else beside.events
        self.machine = machine
        self.report: GoodputReport = GoodputReport() if beside is None else beside.report
        config = PolicyConfig(hand_back=policy == HAND_BACK)
        name = "cache_aware" if policy == HAND_BACK else policy
        policies = create_policies(name, config=config, source=random.Random(seed))
        prefill: list[Role] = ["prefill"] * num_prefill
        decode: list[Role] = ["decode"] * num_decode
        models = [] if beside is None else list(beside.models.values())
        self.models: dict[PooledEngine, ModelledEngine] = {}
        for number, role in enumerate(prefill + decode):
            client: Any = _Client(f"http://{role}-{number}")
            engine = PooledEngine(client, role, _info(f"{role}-{number}", role, machine), None)
            model = models[number] if models else ModelledEngine(self.events, machine)
            guess = KnownPrefixes(_PAGE, machine.kv_tokens, lambda: self.events.now)
            engine.known = KnownByEvents(model.cache, lambda: self.events.now) if has_events else guess
            self.models[engine] = model
        self.pairs = Pairs(pause_s=30.0)
        self.backs = ModelledHandBacks(EngineConnector(ConnectorConfig()), config)
        self.routes = Routes(self, policies, _LOCAL, self.backs)

    def usable(self, healthy: bool) -> list[PooledEngine]:
        return list(self.models) if healthy else []

    def run(self, trace: Sequence[TraceRequest], others: Sequence[Cluster] = ()) -> GoodputReport:
        """`others`: routers `beside` this one. A balancer sends each request to any of them."""
        routers, rng = [self, *others], random.Random(1)
        for request in trace:
            router = rng.choice(routers)
            self.events.at(request.at_s, lambda router=router, request=request: router._arrive(request))  # type: ignore[misc]
        self.events.run()
        self.report.computed = sum(model.computed for model in self.models.values())
        return self.report

    def _arrive(self, request: TraceRequest, hand_off: bool = False) -> None:
        tokens: Any = request.prompt
        wire = GenerateRequest(
            request_id=f"{request.conversation}-{request.turn}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=request.num_output),
        )
        route = self.routes.choose(wire, (), hand_off, str(request.conversation))
        assert route is not None
        prompt = PromptBlocks(tokens)
        if route.max_prefill_tokens is not None:
            lacking = len(tokens) - self.models[route.decode].cache.num_tokens(prompt)
            if lacking > route.max_prefill_tokens:
                self.routes.declined(route, wire)
                return self._arrive(request, True)
        legs = ExitStack()
        engines: dict[LegRole, PooledEngine | None] = {"prefill": route.prefill, "decode": route.decode}
        prefilled = [
            legs.enter_context(engine.leg(lambda error: None, charge=route.charges[role]))
            for role, engine in engines.items()
            if engine is not None and role in route.charges
        ]
        job = Job(request, prompt, route, legs, prefilled, request.num_output - 1)
        self.report.asked += len(tokens)
        self._hand_back(job)

    def _hand_back(self, job: Job) -> None:
        """Move a prefix first, if the router says so, and then compute the prompt."""
        route, begins = job.route, self.events.now
        computes = route.prefill or route.decode

        def compute() -> None:
            self.models[computes].compute(job, lambda: self._first_token(job))

        if route.hand_back is None or route.prefill is None:
            return compute()
        source, destination = self.models[route.hand_back.source], self.models[route.prefill]
        held, has = source.cache.num_tokens(job.prompt), destination.cache.num_tokens(job.prompt)
        num = max(0, held - has)
        seconds = self.machine.latency_s + num * self.machine.move_s

        def moved() -> None:
            destination.cache.learn(PromptBlocks(job.prompt.tokens[:held]))
            self.backs.moved(source_engine, destination_engine, seconds, num)
            self.report.moved_back += num
            compute()

        source_engine, destination_engine = route.hand_back.source, route.prefill
        self.events.at(begins + seconds, moved)

    def _first_token(self, job: Job) -> None:
        job.first_s = self.events.now
        self.report.ttft_s.append(job.first_s - job.request.at_s)
        for call in job.prefilled:
            call()
        decode, computed = self.models[job.route.decode], len(job.prompt.tokens) - job.hit
        if job.route.prefill is not None:
            self.backs.has_computed(job.route.prefill, computed * self.machine.prefill_s, computed)
            wanted = len(job.prompt.tokens) - decode.cache.num_tokens(job.prompt)
            late_s = self.machine.latency_s + wanted * self.machine.move_s
            self.events.at(self.events.now + late_s, lambda: decode.decode(job, lambda: self._end(job)))
        else:
            decode.decode(job, lambda: self._end(job))

    def _end(self, job: Job) -> None:
        job.legs.close()
        request, now = job.request, self.events.now
        tpot = (now - job.first_s) / max(1, request.num_output - 1)
        self.report.tpot_s.append(tpot)
        self.report.num_good += job.first_s - request.at_s <= TTFT_SLO_S and tpot <= TPOT_SLO_S
        tokens: Any = request.prompt
        wire = GenerateRequest(request_id="", prompt_token_ids=tokens, sampling_params=SamplingParams())
        self.routes.served(job.route, wire, request.answered[request.num_prompt :])


@dataclass(frozen=True, slots=True)
class _Client:
    url: str


def _info(name: str, role: Role, machine: Machine) -> EngineInfo:
    return EngineInfo(
        engine_id=name,
        incarnation=name,
        control_addresses=[],
        fingerprint="{}",
        vocab_size=1 << 17,
        eos_token_ids=[],
        num_speculative_tokens=0,
        role=role,
        model="modelled",
        model_path="",
        max_model_len=1 << 20,
        kv_tokens=machine.kv_tokens,
        batch_invariant=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--speeds", default="2,3,4", help="how many times as fast as published")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    options = parser.parse_args()
    print(f"objectives: TTFT {TTFT_SLO_S:g} s, TPOT {TPOT_SLO_S * 1e3:g} ms; {Machine()}")
    print(
        "| policy | speed | requests/s | goodput/s | share within | TTFT p50, p90, p99 (ms) | TPOT p50, p99 (ms) | "
        "computed | handed back |\n|---|---|---|---|---|---|---|---|---|"
    )
    for speed in map(float, options.speeds.split(",")):
        trace = make_trace(options.requests, speed)
        for policy in options.policies.split(","):
            report = Cluster(policy, options.prefill, options.decode, Machine()).run(trace)
            print(report.line(policy, speed, trace[-1].at_s), flush=True)
        print(f"trace at {speed:g}: {describe(trace)}")


if __name__ == "__main__":
    main()
