"""What both engine models share: legs of requests, their pages, and what the agent has proven about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.protocol.events import DecodeCommitted, DecodeFinished, DecodeReleased, HandoffEvent, PrefillReleased
from baton.handoff.protocol.messages import AttemptKey, Cancelled, Commit, Confirm, Finished
from baton.handoff.protocol.ticket import SignedTicket
from baton.kv.interval import Interval
from simulation.story import Story

if TYPE_CHECKING:
    from simulation.memory import GroupMemory
    from simulation.process import Process
    from simulation.router import Stream

# What ends an attempt: its pages are the engine's again.
Ending = PrefillReleased | DecodeCommitted | DecodeFinished | DecodeReleased


@dataclass(slots=True, eq=False)
class Leg:
    """One leg of one request on one engine. `num_known` tokens are the leg's prompt; `holder` is the name
    under which it holds pages.
    """

    story: Story
    num_known: int
    ticket: SignedTicket
    stream: Stream
    deadline: float  # by this process's monotonic clock
    holder: str
    state: str = "waiting"
    admitted: bool = False  # on D: P has said so
    loaded: bool = True  # the prefix store has been looked through
    pages: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, Interval] = field(default_factory=dict)
    uncached: set[str] = field(default_factory=set)
    proven: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    drafted: int = 0
    ended: bool = False  # the router was told
    failed: bool = False  # the agent said so
    late_since: float | None = None

    @property
    def key(self) -> AttemptKey:
        """The attempt it is a leg of."""
        return self.ticket.key


class EngineModel:
    """Base of the two engine models. All methods but the two `agent_*` ones run in the engine's loop."""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.legs: dict[AttemptKey, Leg] = {}
        self.num_drafts = process.world.settings.num_drafts
        # Attempts whose pages the agent has let go of: no copy for them may touch this engine any more.
        self.quiet: set[str] = set()

    # ------------------------------------------------------------ to be filled in

    def handle(self, event: HandoffEvent) -> None:
        """An event of the agent."""
        raise NotImplementedError

    def proven_quiet(self, event: Ending) -> None:
        """The agent lets go of an attempt's pages; called in the agent's loop."""
        raise NotImplementedError

    def step(self) -> bool:
        """One step of the engine; True when another is due."""
        raise NotImplementedError

    def start_leg(self, leg: Leg) -> None:
        """A leg that the router sent."""
        raise NotImplementedError

    def abandon(self, leg: Leg) -> None:
        """The router hung up on a leg."""
        raise NotImplementedError

    def abort_any(self) -> bool:
        """A fault: the engine gives up on one of its legs by itself; False when it has none."""
        raise NotImplementedError

    def close(self) -> None:
        """The process is about to end: every leg ends here, and the agent is told to give up on all."""
        for leg in self.legs.values():
            self.end(leg, "engine_closed", recoverable=True)
            leg.state = "closing"

    def vouches(self, message: Cancelled | Commit | Confirm | Finished) -> None:
        """A message leaves by which the peer may free or trust pages: what it says must be so."""
        label = str(message.key)
        if isinstance(message, Confirm):
            if label in self.quiet:
                self.world.fail("false_confirm", f"{self.process.name} confirms {label}, whose pages it has let go of")
            return
        copies = self.process.transport.pending
        pending = [copy.tag for copy in copies if copy.label == label and not copy.harmless]
        if pending:
            kind = type(message).__name__.upper()
            self.world.fail("false_quiet", f"{self.process.name} says {kind} of {label} while {pending} go on")

    def look_for_prefix(self, leg: Leg) -> None:
        """Some legs wait for what a prefix store holds of them, so that queues are in another order than arrivals."""
        if self.world.settings.has("prefix_store") and self.world.random.random() < 0.5:
            leg.loaded = False
            late = self.world.random.choice((0.1, 1.0)) * self.world.random.random()
            self.world.after(late, self.process.post, lambda: self.loaded(leg))

    def loaded(self, leg: Leg) -> None:
        """The prefix store has been looked through."""
        leg.loaded = True

    def agent_has_run(self) -> None:
        """After each turn of the agent's loop."""

    # ------------------------------------------------------------ pages

    def memory(self, group: str) -> GroupMemory:
        """A group's memory."""
        return next(memory for memory in self.process.memories if memory.model.name == group)

    def allocate(self, leg: Leg, hits: dict[str, int], num_tokens: int) -> bool:
        """Give a leg exclusive pages for `num_tokens` tokens behind its prefix hits, in every group or in none.

        A page that a hit covers in part is copied.
        """
        plans = []
        for memory in self.process.memories:
            group, size = memory.model.name, memory.page_size
            cached = memory.lookup(leg.story, leg.num_known)[: -(-hits[group] // size)]
            shared, rest = cached[: hits[group] // size], cached[hits[group] // size :]
            count = -(-num_tokens // size) - len(shared)
            # Held while others are allocated, so that nothing evicts them.
            memory.share(cached, leg.holder)
            plans.append((memory, shared, rest, count))
        if any(memory.num_available < count for memory, _, _, count in plans):
            for memory, shared, rest, _ in plans:
                memory.release([*shared, *rest], leg.holder)
            return False
        self.world.progress()
        for memory, shared, rest, count in plans:
            fresh = memory.allocate(count, leg.holder)
            for source, dest in zip(rest, fresh, strict=False):
                memory.copy_page(source, dest)
            memory.release(rest, leg.holder)
            leg.pages[memory.model.name] = shared + fresh
        leg.hits = dict(hits)
        return True

    def hits(self, leg: Leg) -> dict[str, int]:
        """Tokens of the leg's prompt that each group's cache holds, cut anywhere."""
        random, out = self.world.random, {}
        for memory in self.process.memories:
            held = len(memory.lookup(leg.story, leg.num_known)) * memory.page_size
            hit = memory.model.rules.hit(held, leg.num_known)
            if hit and random.random() < 0.3:
                hit = random.randint(0, hit)
            out[memory.model.name] = hit
        return out

    def free(self, leg: Leg) -> None:
        """Let go of all pages of a leg."""
        for group, pages in leg.pages.items():
            self.memory(group).release(pages, leg.holder)
        leg.pages = {}

    def compute(self, leg: Leg, start: int, stop: int, drafted: int) -> None:
        """A forward pass over tokens `[start, stop)`, and the drafter's up to entry `drafted`: reads what is
        there before, writes what follows.
        """
        self.check_kv(leg)
        self.world.progress()
        for memory in self.process.memories:
            table = leg.pages[memory.model.name]
            if memory.model.owner == "target":
                memory.write(leg.story, table, start, stop)
            else:
                memory.write(leg.story, table, leg.drafted, drafted)
                memory.scribble(table, drafted, drafted + self.num_drafts, self.world.random.getrandbits(60))
        leg.computed, leg.drafted = stop, drafted

    def check_kv(self, leg: Leg) -> None:
        """A step reads all KV that the leg has: every entry must be the right one."""
        for memory in self.process.memories:
            group = memory.model
            # Not asked of `Rules`, which this checks.
            start = 0 if group.window is None else max(0, leg.computed - group.window + 1)
            stop = leg.computed if group.owner == "target" else leg.drafted
            bad = memory.wrong(leg.story, leg.pages[group.name], start, stop)
            if bad is not None:
                page = leg.pages[group.name][bad // memory.page_size]
                self.world.fail(
                    "wrong_kv",
                    f"{self.process.name} decodes {leg.holder} with another KV entry of {group.name} at token {bad} "
                    f"(page {page}, hits {leg.hits}, wanted {leg.wanted})",
                )

    def begin(self, leg: Leg, common: int) -> None:
        """Compute from a common prefix hit on."""
        leg.computed = leg.drafted = common

    def cache(self, leg: Leg) -> None:
        """Enter what is computed of the leg's tokens into the prefix cache, full pages only."""
        for memory in self.process.memories:
            computed = leg.computed if memory.model.module == 0 else leg.drafted
            final = memory.model.rules.final(leg.computed, computed)
            if memory.model.name not in leg.uncached:
                memory.cache(leg.story, leg.pages[memory.model.name], final)

    def end(self, leg: Leg, outcome: str, recoverable: bool = False) -> None:
        """Tell the router that the leg is over."""
        if not leg.ended:
            leg.ended = True
            leg.stream.end(outcome, recoverable)


def label_of(event: Ending) -> str:
    """The name of an event's attempt, as copies carry it."""
    return str(event.key)
