"""Requests in random event orders: the engine's real core, scheduler, legs and cache, over cells in place of KV.

The prompt alone decides the tokens of each modelled step, so every client's tokens are known in advance. The agent, the
prefix store and the clients act at random times, and peers write into their pages until these are proven quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.legs.leg import LegSettings
from baton.engine.metrics import EngineMetrics
from baton.engine.planning import DraftRows
from baton.engine.request import Request
from baton.engine.sampling.stopping import until_stop
from baton.engine.scheduler import ScheduledRows, Scheduler
from baton.engine.step import DecodingLimits, StepOutcome
from baton.engine.step_plans import PlanSpec
from baton.handoff.agent.leg_events import LegEvent
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.kv.interval import Interval
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, HandoffParams, TokenChunk
from tests.kv.test_cache import LOOKAHEAD, WINDOW, Memory

EOS = 13
CONTEXT = 40
BAD = (-1,)


def next_token(tokens: Sequence[int]) -> int:
    return 10 + (sum(tokens) * 7 + len(tokens) * len(tokens)) % 9


def whole(request: Request) -> list[int]:
    """All tokens that the request will have."""
    tokens = request.token_ids[: request.num_prompt]
    twin = SimpleNamespace(params=request.params, stop_token_ids=frozenset(), num_prompt=len(tokens), num_output=0)
    while True:
        tokens = [*tokens, next_token(tokens)]
        if until_stop(twin, tokens[-1:], {EOS}, CONTEXT)[1] is not None:  # type: ignore[arg-type]
            return tokens
        twin.num_output += 1


@dataclass(eq=False)
class Attempt:
    """One leg from the agent's side. `state` on P: open, sampled; on D: announced, admitted, placed, failed,
    aborted.
    """

    request: Request
    state: str
    prompt: list[int]
    pages: dict[str, list[int]] = field(default_factory=dict)
    final: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, Interval] = field(default_factory=dict)
    proven: dict[str, int] = field(default_factory=dict)


class Engine:
    """One core and its surroundings, with a modelled agent and prefix store."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.memory = Memory(num_pages=self.random.choice([14, 16, 30]))
        assert self.memory.cache.fits(CONTEXT)
        sizes = [self.random.choice(most) for most in ([6, 16], [2, 8], [None, 3])]
        self.scheduler = Scheduler(self.memory.cache, *sizes)
        metrics = EngineMetrics()
        recovery: Any = self.random.choice(["full", "full", "none"])

        def ends(request: Request, token: int) -> bool:
            return until_stop(request, [token], {EOS}, CONTEXT)[1] is not None

        agent: Any = self
        self.legs = HandoffLegs(agent, self.scheduler, metrics, ends, LegSettings(100, LOOKAHEAD, recovery, 1000.0))
        limits = DecodingLimits(frozenset([EOS]), CONTEXT, LOOKAHEAD)
        # Steps are modelled, so no plan is ever made.
        executor: Any = SimpleNamespace(spec=PlanSpec((), (), (), True, False))
        self.core = EngineCore(executor, self.scheduler, self.legs, limits, self.emit, agent)
        self.core.steps.compute = self.compute  # type: ignore[method-assign]
        self.prefills: dict[AttemptKey, Attempt] = {}
        self.decodes: dict[AttemptKey, Attempt] = {}
        self.loads: list[Callable[[], None]] = []
        self.saved: list[tuple[dict[str, list[int]], list[int]]] = []
        self.streams: dict[Request, list[TokenChunk]] = {}
        self.ended: dict[Request, int] = {}
        self.by_id: dict[str, Request] = {}

    # ------------------------------------------------------------ clients

    def emit(self, chunk: TokenChunk, last: bool) -> None:
        request = self.by_id[chunk.request_id]
        assert not self.ended[request], "a chunk after the end"
        self.ended[request] += last
        self.streams[request].append(chunk)
        if chunk.token_ids and chunk.position is not None:
            at = request.num_prompt + chunk.position
            assert whole(request)[at : at + len(chunk.token_ids)] == chunk.token_ids

    def come(self) -> None:
        random = self.random
        prompt = [random.choice([1, 2])] * random.randint(1, 14)
        prompt += [random.randint(3, 9) for _ in range(random.randint(0, 6))]
        role: Any = random.choice([None, "prefill", "decode", "decode"])
        num, ignore_eos = random.choice([1, 2, 6, 20]), random.random() < 0.3
        params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=ignore_eos)
        name = f"r{random.randint(0, 30)}"
        if name in self.by_id and not self.ended[self.by_id[name]]:
            return
        handoff = HandoffParams(role=role, ticket="t" * 200) if role else None
        moves = handoff is not None and len(prompt) > 1 and random.random() < 0.4
        if moves:
            start = random.choice([0, 0, random.randint(0, len(prompt))])
            length = random.randint(1, len(prompt) - 1)
            handoff = HandoffParams(role=role, ticket="t" * 200, prefix_len=length, window_start=start)
        wire = GenerateRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            handoff=handoff,
            priority=random.choice([0, 0, -1, 1]),
        )
        sampler: Any = SimpleNamespace(advance=lambda tokens: None)
        ticket: Any = SimpleNamespace(key=AttemptKey(random.randbytes(16), 0, "p", "d")) if role else None
        request = Request(wire, sampler, ticket)
        known = whole(request)
        if random.random() < 0.3 and not moves:
            count = random.randint(0, len(known) - len(prompt) - 1)
            wire = GenerateRequest(
                request_id=name,
                prompt_token_ids=known[: len(prompt) + count],
                sampling_params=params,
                handoff=handoff,
                num_prompt_tokens=len(prompt),
                priority=wire.priority,
            )
            request = Request(wire, sampler, ticket)
        self.by_id[name] = request
        self.streams[request], self.ended[request] = [], 0
        self.core.post(lambda: self.core.add(request))

    def leave(self) -> None:
        """A client hangs up; its stream counts as ended."""
        open_now = [request for request in self.by_id.values() if not self.ended[request]]
        if open_now:
            request = self.random.choice(open_now)
            self.core.post(lambda: self.hang_up(request))

    def hang_up(self, request: Request) -> None:
        if not self.ended[request]:
            self.core.abort(request.request_id)
            self.ended[request] = 1

    # ------------------------------------------------------------ the prefix store

    def bind(self, post: Callable[[Callable[[], None]], None], on_failure: Callable[[str], None]) -> None:
        pass

    def load(self, request: Request, then: Callable[[int], None]) -> bool:
        if self.random.random() < 0.7:
            return False
        self.loads.append(lambda: then(0))
        return True

    def save(self, request: Request, num_final: int) -> None:
        pools = self.memory.cache.pools
        pages: dict[str, list[int]] = {}
        for name, pool in pools.items():
            table = request.kv.pages[name]
            pages[name] = table[: min(num_final // pool.page_size, pool.num_computed(table))]
        for name, table in pages.items():
            pools[name].share(table)
        self.saved.append((pages, list(request.token_ids)))

    def store(self) -> None:
        if self.loads and self.random.random() < 0.5:
            self.core.post(self.loads.pop(self.random.randrange(len(self.loads))))
        if self.saved and self.random.random() < 0.5:
            pages, tokens = self.saved.pop()
            for name, table in pages.items():
                self.holds(name, table, tokens, 0, len(table) * self.memory.cache.pools[name].page_size)
            self.core.post(lambda: self.stored(pages))

    def stored(self, pages: dict[str, list[int]]) -> None:
        for name, table in pages.items():
            self.memory.cache.pools[name].release(table)

    def holds(self, name: str, table: list[int], tokens: list[int], start: int, stop: int) -> None:
        size = self.memory.cache.pools[name].page_size
        for entry in range(start, stop):
            found = self.memory.cells.get((name, table[entry // size], entry % size))
            assert found == self.memory.truth(name, tokens, entry), (name, entry)

    def put(self, name: str, table: list[int], tokens: list[int] | None, start: int, stop: int) -> None:
        size = self.memory.cache.pools[name].page_size
        for entry in range(start, stop):
            assert table[entry // size], "written into the null page"
            value = BAD if tokens is None else self.memory.truth(name, tokens, entry)
            self.memory.cells[name, table[entry // size], entry % size] = value

    # ------------------------------------------------------------ the agent: calls of the engine

    def open_prefill(self, ticket: Any) -> None:
        request = self.legs.open[ticket.key].request
        self.prefills[ticket.key] = Attempt(request, "open", request.token_ids[: request.prefill_len])

    def admit_prefill(self, key: AttemptKey) -> None:
        pass

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        attempt = self.prefills.get(key)
        match event:
            case ev.Declared(_, pages, final) if attempt is not None:
                attempt.pages, attempt.final = pages, final
            case ev.Sampled(_, finished, final) if attempt is not None:
                attempt.state, attempt.final = "finished" if finished else "sampled", final
                assert finished or set(final.values()) == {len(attempt.prompt)}

    def announce_decode(self, ticket: Any) -> None:
        request = self.legs.open[ticket.key].request
        self.decodes[ticket.key] = Attempt(request, "announced", request.token_ids[: request.prefill_len])

    def open_decode(self, ticket: Any, prompt_len: int, wanted: Any, pages: dict[str, list[int]]) -> None:
        attempt = self.decodes.get(ticket.key)
        if attempt is not None and attempt.state == "admitted":
            attempt.state, attempt.wanted = "placed", dict(wanted)
            attempt.prompt = attempt.request.token_ids[:prompt_len]
            attempt.pages = {name: list(table) for name, table in pages.items()}

    def abort(self, key: AttemptKey, reason: str) -> None:
        attempt = self.prefills.get(key) or self.decodes.get(key)
        if attempt is not None and attempt.state != "failed":
            attempt.state = "aborted"

    # ------------------------------------------------------------ the agent: its events

    def say(self, event: ev.HandoffEvent) -> None:
        self.core.post(lambda: self.core.on_handoff(event))
        if self.random.random() < 0.05:
            self.core.post(lambda: self.core.on_handoff(event))

    def prefill_ends(self, key: AttemptKey, attempt: Attempt, at_last: bool) -> None:
        request = attempt.request
        for name, table in attempt.pages.items():
            # Until the release a peer reads what was declared final and may be wanted.
            wanted = self.memory.cache.rules[name].wanted(len(attempt.prompt), 0)
            self.holds(name, table, request.token_ids, wanted.start, attempt.final.get(name, 0))
        if at_last or self.random.random() < 0.15:
            del self.prefills[key]
            outcome = {"sampled": "committed", "finished": "finished"}.get(attempt.state, "peer_lost")
            self.say(ev.PrefillReleased(key, outcome))

    def decode_goes_on(self, key: AttemptKey, attempt: Attempt, at_last: bool) -> None:
        random, request = self.random, attempt.request
        tokens = whole(request)
        writable = attempt.wanted if attempt.state in ("placed", "failed", "aborted") else {}
        for name, wanted in writable.items():
            start = max(wanted.start, attempt.proven.get(name, 0))
            self.put(name, attempt.pages[name], None, start, wanted.stop)
        what = random.random()
        if attempt.state in ("failed", "aborted"):
            if at_last or what < 0.15:
                del self.decodes[key]
                self.say(ev.DecodeReleased(key))
        elif attempt.state == "announced" and what < 0.5:
            attempt.state = "admitted"
            self.say(ev.DecodeAdmitted(key))
        elif at_last or what < 0.1:
            attempt.state = "failed"
            self.say(ev.DecodeFailed(key, "peer_lost", "gone", random.random() < 0.7))
        elif what < 0.15:
            del self.decodes[key]
            self.say(ev.DecodeFinished(key, self.seeds(attempt)))
        elif attempt.state == "placed" and what < 0.3:
            for name, wanted in attempt.wanted.items():
                stop = random.randint(wanted.start, wanted.stop)
                if stop > attempt.proven.get(name, wanted.start):
                    self.put(name, attempt.pages[name], tokens, wanted.start, stop)
                    attempt.proven[name] = stop
            self.say(ev.DecodeProgress(key, dict(attempt.proven)))
        elif attempt.state == "placed" and what < 0.6:
            for name, wanted in attempt.wanted.items():
                self.put(name, attempt.pages[name], tokens, wanted.start, wanted.stop)
            del self.decodes[key]
            self.say(ev.DecodeCommitted(key, self.seeds(attempt), 1, 1))

    def seeds(self, attempt: Attempt) -> Seeds:
        first = whole(attempt.request)[len(attempt.prompt)]
        wrong = self.random.random() < 0.1
        if attempt.request.prefix_len is not None:
            return Seeds(200 if wrong else first)
        return Seeds(200 if wrong else first, None, [self.random.randint(10, 18) for _ in range(LOOKAHEAD)])

    # ------------------------------------------------------------ a step

    def compute(self, scheduled: Sequence[ScheduledRows]) -> StepOutcome:
        done = StepOutcome()
        for rows in scheduled:
            request, stop = rows.request, rows.start + rows.num_rows
            assert rows.start == request.num_computed == request.num_drafted
            for name, table in request.kv.pages.items():
                seen_from = max(0, rows.start - WINDOW + 1) if name == "window" else 0
                self.holds(name, table, request.token_ids, seen_from, rows.start)
            if self.random.random() < 0.03:
                done.failed[request] = ValueError("no such token")
                continue
            prefilling, reason = request.is_prefilling, None
            if not prefilling or stop == len(request.token_ids):
                count = 1 if prefilling else self.random.randint(1, rows.num_rows)
                new = whole(request)[len(request.token_ids) :][:count]
                new, reason, _ = until_stop(request, new, {EOS}, CONTEXT)
                position = request.num_output
                request.token_ids += new
                request.finish_reason, request.draft_ids = reason, []
                name = request.request_id
                chunk = TokenChunk(request_id=name, token_ids=new, position=position, finish_reason=reason)
                self.core.emit(chunk, reason is not None)
            request.num_computed = stop if prefilling else len(request.token_ids) - 1
            for name, pool in self.memory.cache.pools.items():
                table = request.kv.pages[name]
                for entry in range(rows.start, stop + LOOKAHEAD):
                    page = table[entry // pool.page_size]
                    assert page, "a step writes into the null page"
                    assert pool._refs[page] == 1, "a step writes into a page that others hold"
                    assert page not in pool._cached, "a step writes into a page of the prefix cache"
                self.put(name, table, None, rows.start, stop + LOOKAHEAD)
                if name != "draft" or reason is None:
                    self.put(name, table, request.token_ids, rows.start, request.num_computed)
            if reason is None:
                drafts = self.core.limits.num_drafts(request) if request.num_computed >= request.prefill_len else 0
                request.draft_ids = [self.random.randint(10, 18) for _ in range(drafts)]
                done.draft_rows.append(DraftRows(request, (), rows.start, request.num_computed, drafts))
        return done

    def turn(self, at_last: bool = False) -> None:
        random = self.random
        timeout_s = random.choice([0.0, 1000.0, 1000.0, 1000.0])
        self.legs.settings = replace(self.legs.settings, handoff_timeout_s=timeout_s)
        self.core.queue_timeout_s = 1e-9 if random.random() < 0.02 else 0.0
        for key, attempt in list(self.prefills.items()):
            self.prefill_ends(key, attempt, at_last)
        for key, attempt in list(self.decodes.items()):
            self.decode_goes_on(key, attempt, at_last)
        self.store()
        if random.random() < 0.9:
            self.core.drain()
            self.core.step()
        for name, pool in self.memory.cache.pools.items():
            assert pool.num_referenced + pool.num_quarantined + pool.num_available == pool.num_pages - 1, name

    def run(self) -> None:
        for _ in range(150):
            if self.random.random() < 0.4:
                self.come()
            if self.random.random() < 0.1:
                self.leave()
            self.turn()
        for _ in range(600):
            self.turn(at_last=True)
        assert not self.core.requests
        assert not self.legs.open
        assert not self.core.scheduler.has_work
        assert not self.scheduler.receiving
        for pool in self.memory.cache.pools.values():
            assert (pool.num_referenced, pool.num_quarantined) == (0, 0)
        assert set(self.ended.values()) <= {1}


@pytest.mark.parametrize("part", range(4))
def test_every_request_ends_once_exact_and_leaves_nothing(part: int) -> None:
    for seed in range(part, 120, 4):
        engine = Engine(seed)
        try:
            engine.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
