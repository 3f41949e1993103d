"""The engine of a process: the real core, scheduler, handoff legs, cache and steps over an executor that writes cells.

Every call to the agent and every event from it is checked against the cells.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from baton.engine.core import EngineCore
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.legs.layer_stream import LayerStream, StreamLimits
from baton.engine.legs.leg import LegSettings
from baton.engine.mailbox import Mailbox
from baton.engine.metrics import EngineMetrics
from baton.engine.request import Request, RequestStatus
from baton.engine.request_checks import make_request
from baton.engine.sampling.stopping import until_stop
from baton.engine.scheduler import Scheduler
from baton.engine.step import DecodingLimits
from baton.errors import BatonError
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.events import (
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    HandoffEvent,
    PrefillReleased,
)
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import Redeemer
from baton.kv.cache import KVCache
from baton.kv.interval import Interval
from baton.wire import TokenChunk
from simulation.agent import SimAgent
from simulation.executor import CellExecutor, Half
from simulation.prefix_store import SimPrefixStore
from simulation.story import LONGEST, LONGEST_SMALL, VOCAB, Story

if TYPE_CHECKING:
    from simulation.legs import Stream
    from simulation.modelled.memory import GroupMemory
    from simulation.process import Process

# Events that end an attempt: its pages belong to the engine again.
ENDINGS = (PrefillReleased, DecodeCommitted, DecodeFinished, DecodeReleased)
MAX_OUTPUT = 10


# Tokens between checkpoints of states: as few as whole pages allow, because prompts are short; or more than any has, so
# that there are those at ends alone. The seeds below find the other mutations.
_NEAR, _FAR = 1, 200
_FIRST_WITH_FAR = 1200


@dataclass(slots=True, eq=False)
class Receipt:
    """Pages that D has opened to an attempt. `deadline` is on the process's monotonic clock."""

    story: Story
    num_tokens: int
    wanted: dict[str, Interval]
    pages: dict[str, list[int]]
    deadline: float
    failed: bool = False
    given_up: bool = False  # by the engine
    late_since: float | None = None


class Engine:
    def __init__(self, process: Process, instance: Instance) -> None:
        self.process, self.world, self.name = process, process.world, process.name
        settings, random = self.world.settings, self.world.random
        self._memories = {memory.model.name: memory for memory in process.memories}
        executor: Any = CellExecutor(self)
        self.executor: CellExecutor = executor
        specs = [next(iter(memory.ranks.values())).spec for memory in process.memories]
        num_pages = {name: memory.num_pages for name, memory in self._memories.items()}
        interval = _FAR if self.world.seed >= _FIRST_WITH_FAR and self.world.seed % 2 else _NEAR
        self.cache = KVCache(specs, num_pages, settings.num_drafts, executor.copy_page, checkpoint_tokens=interval)
        longest = (LONGEST_SMALL if settings.has("full_pools") else LONGEST) + MAX_OUTPUT + 1
        longest = longest if process.context is None else min(longest, process.context)
        assert self.cache.fits(longest)
        self.scheduler = Scheduler(self.cache, random.choice((8, 16, 64)), random.choice((2, 4, 16)))
        self.agent: SimAgent = SimAgent(self, instance)
        self.metrics = EngineMetrics()

        def ends(request: Request, token: int) -> bool:
            return until_stop(request, [token], set(process.model.eos), longest)[1] is not None

        layers = None
        if settings.by_layer:
            whole = [memory.spec for memory in process.memories]
            few = random.choice((1, 1, 200))
            by_layer, many_ranks = bool(self.world.seed % 4), len(process.ranks) > 1
            layers = LayerStream(self.agent, self.cache, whole, many_ranks, by_layer, StreamLimits(few, 0))
        self.legs = HandoffLegs(
            self.agent,
            self.scheduler,
            self.metrics,
            ends,
            LegSettings(
                vocab_size=VOCAB,
                max_drafts=settings.num_drafts,
                recovery=settings.recovery,
                handoff_timeout_s=settings.timers.handoff,
                kv_stream="chunk" if layers is None else "layer",
            ),
            process.clock,
            layers,
        )
        store: Any = SimPrefixStore(self) if settings.has("prefix_store") else None
        self.core = EngineCore(
            executor,
            self.scheduler,
            self.legs,
            DecodingLimits(frozenset(process.model.eos), longest, settings.num_drafts),
            self._emit,
            store,
            mailbox=Mailbox(process.clock),
        )
        fingerprint = json.dumps(process.config.fingerprint, sort_keys=True)
        info = SimpleNamespace(
            vocab_size=VOCAB,
            max_model_len=longest,
            eos_token_ids=list(process.model.eos),
            default_seed=None,
            fingerprint=fingerprint,
        )
        redeemer = Redeemer(process.config.ticket_key, process.name, process.uid)
        self._front: Any = SimpleNamespace(info=info, core=self.core, redeemer=redeemer, tokenizer=None)
        self.longest = longest
        self._streams: dict[str, Stream] = {}
        self._names: dict[Stream, str] = {}  # request names by stream
        self.stories: dict[str, Story] = {}  # by request
        self.closed = False
        # By attempt: D's open pages, P's requests, and attempts whose pages the agent has released, so that no copy may
        # touch them.
        self.receipts: dict[str, Receipt] = {}
        self.prefills: dict[str, Request] = {}
        self.quiet: set[str] = set()

    def memory(self, group: str) -> GroupMemory:
        return self._memories[group]

    # ------------------------------------------------------------ requests

    def serve(self, stream: Stream) -> None:
        wire = stream.request
        name = f"{self.name} {len(self.stories)} {wire.request_id}"
        self._names[stream] = name
        wire = msgspec.structs.replace(wire, request_id=name)
        try:
            request = make_request(self._front, wire)
        except BatonError as error:
            self.world.note(self.name, f"refuses a leg: {error}")
            stream.refuse(error)
            return
        known = len(wire.prompt_token_ids) if wire.num_prompt_tokens is None else wire.num_prompt_tokens
        story = Story(wire.prompt_token_ids[:known], wire.sampling_params, self.process.model)
        self._streams[name], self.stories[name] = stream, story
        self.core.add(request)

    def hung_up(self, stream: Stream) -> None:
        name = self._names.get(stream)
        if name is not None and self._streams.pop(name, None) is not None:
            self.core.abort(name)

    def _emit(self, chunk: TokenChunk, last: bool) -> None:
        stream, story = self._streams.get(chunk.request_id), self.stories[chunk.request_id]
        self.world.progress()
        if chunk.token_ids:
            assert chunk.position is not None
            at = story.num_prompt + chunk.position
            if story.tokens[at : at + len(chunk.token_ids)] != chunk.token_ids:
                self.world.fail("wrong_token", f"{self.name}: {chunk.request_id} got {chunk.token_ids} at {at}")
        if stream is not None:
            if last:
                del self._streams[chunk.request_id]
            stream.send(msgspec.structs.replace(chunk, token_ids=list(chunk.token_ids)), last)

    def fail_any(self) -> bool:
        """A fault: the engine aborts one of its own requests. Returns False if it has none."""
        found = bool(self.core.requests)
        if found and self.world.computing is self.process:
            self.process.post(self._fail_one)  # the engine's thread is in a forward
        elif found:
            self._fail_one()
        return found

    def _fail_one(self) -> None:
        requests = [self.core.requests[name] for name in sorted(self.core.requests)]
        if requests:
            request = self.world.random.choice(requests)
            if request.status is RequestStatus.RUNNING:
                half: Half = self.world.random.choice(("target", "drafter"))
                self.executor.failing[request.request_id] = half
            elif request.status is RequestStatus.AWAITING_RELEASE:
                self.core.abort(request.request_id)
            else:
                self.core.finish(request, "error", "engine_failed", recoverable=True)

    def close(self) -> None:
        """The process is about to end: no more steps, and every stream ends now."""
        self.closed = True
        for receipt in self.receipts.values():
            receipt.given_up = True
        for stream in self._streams.values():
            stream.cut(0.0, self.world.random.uniform(0.0, 0.01))
        self._streams.clear()

    # ------------------------------------------------------------ events of the agent

    def hears(self, event: HandoffEvent) -> None:
        """An event leaves the agent for the engine: what it reports must be true already."""
        self.process.post(lambda: self.on_handoff(event))
        label, world = str(event.key), self.world
        receipt = self.receipts.get(label)
        if isinstance(event, DecodeProgress) and receipt is not None:
            for group, stop in event.proven.items():
                bad = self._bad(receipt, group, Interval(receipt.wanted[group].start, stop))
                if bad is not None:
                    world.fail("false_proof", f"{label}: entry {bad} of {group} was called proven")
        elif isinstance(event, DecodeFailed) and receipt is not None:
            receipt.failed = True
        if not isinstance(event, ENDINGS):
            return
        if label in self.quiet:
            world.fail("released_twice", f"{self.name} was told twice how {label} ended")
        self.quiet.add(label)
        self.prefills.pop(label, None)
        if isinstance(event, DecodeCommitted | DecodeFinished) and event.seeds != self.process.cluster.seeds.get(label):
            world.fail("wrong_seeds", f"{label} ended with {event}")
        if receipt is not None:
            self._close_receipt(label, receipt, event)

    def _close_receipt(self, label: str, receipt: Receipt, event: HandoffEvent) -> None:
        del self.receipts[label]
        if receipt.failed and not isinstance(event, DecodeReleased):
            self.world.fail("commit_after_failure", f"{label} failed on {self.name}, and then {event}")
        if isinstance(event, DecodeCommitted):
            for group, tokens in receipt.wanted.items():
                bad = self._bad(receipt, group, tokens)
                if bad is not None:
                    self.world.fail(
                        "early_commit",
                        f"{label} was committed on {self.name}, but entry {bad} of {group} ({tokens}) is not final",
                    )
        for memory in self._memories.values():
            memory.writers = {page: writer for page, writer in memory.writers.items() if writer != label}

    def _bad(self, receipt: Receipt, group: str, tokens: Interval) -> int | None:
        story, pages = receipt.story, receipt.pages[group]
        return self._memories[group].wrong(story, receipt.num_tokens, pages, tokens.start, tokens.stop)

    def on_handoff(self, event: HandoffEvent) -> None:
        leg, before = self.legs.open.get(event.key), self.metrics.recoveries["recompute"]
        if leg is None:
            self.world.fail("unknown_event", f"{self.name} has no leg {event.key}: {event}")
        self.core.on_handoff(event)
        stream = None if leg is None else self._streams.get(leg.request.request_id)
        if self.metrics.recoveries["recompute"] > before:
            self.process.cluster.rungs["recompute"] += 1
            client = None if stream is None else stream.router.clients.get(stream.request.request_id.partition(".")[0])
            if client is not None:  # else the router tries the pair
                client.rungs.add("recompute")

    def opens(self, key: AttemptKey, num_tokens: int, wanted: dict[str, Interval], pages: dict[str, list[int]]) -> None:
        label, story = str(key), self.stories[self.legs.open[key].request.request_id]
        if label in self.quiet:
            return  # the engine does not know yet that it has ended, and the agent takes no pages for it
        tables = {group: list(table) for group, table in pages.items()}
        limit = self.world.settings.timers.handoff
        receipt = Receipt(story, num_tokens, dict(wanted), tables, self.process.clock.monotonic() + limit)
        self.receipts[label] = receipt
        for group, tokens in wanted.items():
            memory = self._memories[group]
            used = range(tokens.start // memory.page_size, -(-tokens.stop // memory.page_size))
            memory.writers |= {tables[group][index]: label for index in used if not tokens.empty}

        def begin() -> None:
            # Each pair of ranks counts from its own REGISTER, and a paused rank takes this call late.
            receipt.deadline = self.process.clock.monotonic() + limit

        for rank in self.process.ranks:
            rank.call(begin)

    def agent_has_run(self) -> None:
        """No leg waits for a handoff longer than its deadline, unless one of the engine's ranks is dead or paused."""
        if not self.process.whole:
            return
        now, grace = self.process.clock.monotonic(), 2 * self.process.config.timers.check + 0.05
        if self.world.settings.has("slow_work"):
            grace += 2 * self.process.config.timers.lease / 3  # two turns, see `Rank`
        for label, receipt in self.receipts.items():
            if receipt.deadline > now or receipt.failed or receipt.given_up:
                continue
            if receipt.late_since is None or receipt.late_since < self.process.resumed:
                receipt.late_since = now
            elif now > receipt.late_since + grace:
                self.world.fail("deadline", f"{label} waits on {self.name} for longer than a handoff may take")

    # ------------------------------------------------------------ one-sided access, checked

    def may_read(self, group: str, page: int, label: str) -> None:
        """A copy for attempt `label` reads a page here: the attempt must still hold the page."""
        request = self.prefills.get(label)
        if request is None or page not in request.kv.pages.get(group, ()):
            self.world.fail(
                "read_after_free",
                f"a copy for {label} reads page {page} of {group} on {self.name}, which it does not hold; "
                f"proven quiet: {label in self.quiet}",
            )

    def may_write(self, group: str, page: int, label: str) -> None:
        """A copy for attempt `label` writes a page here: the page must be open to that attempt and to nothing else."""
        memory, pool = self._memories[group], self.cache.pools[group]
        mine = pool._refs.get(page) == 1 or page in pool._quarantined
        if memory.writers.get(page) != label or not mine or page in pool._cached:
            self.world.fail(
                "foreign_write",
                f"a copy for {label} writes page {page} of {group} on {self.name}, which is open to "
                f"{memory.writers.get(page)} and held {pool._refs.get(page, 0)} times; quarantined: "
                f"{page in pool._quarantined}, cached: {page in pool._cached}",
            )
