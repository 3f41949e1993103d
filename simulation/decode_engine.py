"""The modelled engine that decodes, and recomputes what a handoff did not bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.protocol.events import (
    DecodeAdmitted,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    HandoffEvent,
)
from baton.handoff.protocol.messages import Seeds
from baton.kv.geometry import NULL_PAGE
from simulation.engine import Ending, EngineModel, Leg, label_of

if TYPE_CHECKING:
    from simulation.process import Process


# States of a leg whose handoff has not ended.
_OPEN = ("announced", "waiting", "receiving")


class DecodeEngine(EngineModel):
    """Registers legs as pages allow, decodes the committed ones with verification of drafts.

    A leg is `announced` (P has no room for it yet), `waiting` (for pages here), `receiving`, `running`, `recomputing`,
    `quarantined` (over, but not proven quiet) or `closing` (aborted before it had pages).
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.recomputing: list[Leg] = []

    def start_leg(self, leg: Leg) -> None:
        """See `EngineModel`."""
        if leg.key in self.legs:
            self.end(leg, "duplicate_leg")
            return
        self.legs[leg.key] = leg
        if self.world.settings.announces:
            leg.state = "announced"
            self.look_for_prefix(leg)
            self.process.call(lambda: self.process.node.announce_decode(leg.ticket))

    def loaded(self, leg: Leg) -> None:
        """See `EngineModel`."""
        super().loaded(leg)
        self._queue(leg)

    def _queue(self, leg: Leg) -> None:
        """Pages go to legs that P has admitted, alone."""
        if leg.state == "announced" and leg.admitted and leg.loaded:
            leg.state = "waiting"

    def abandon(self, leg: Leg) -> None:
        """See `EngineModel`."""
        self._give_up(leg, "aborted")

    def abort_any(self) -> bool:
        """See `EngineModel`."""
        legs = [leg for leg in self.legs.values() if leg.state in (*_OPEN, "running")]
        if legs:
            leg = self.world.random.choice(legs)
            self.end(leg, "engine_failed", recoverable=True)
            self._give_up(leg, "failed")
        return bool(legs)

    def _give_up(self, leg: Leg, reason: str) -> None:
        if self.legs.get(leg.key) is not leg:
            self._drop_recompute(leg)
            return
        runner = self.process.node
        if leg.state in ("announced", "waiting"):
            if not self.world.settings.announces:
                # P may already hold pages for it; without a word from here it would until the ticket expires.
                self.process.call(lambda: runner.open_decode(leg.ticket, {}, {}))
            leg.state = "closing"
        elif leg.state == "receiving":
            leg.state = "quarantined"
        elif leg.state == "running":
            del self.legs[leg.key]
            self.free(leg)
            return
        else:
            return
        self.process.call(lambda: runner.abort(leg.key, reason))

    # ------------------------------------------------------------ what the agent proves

    def proven_quiet(self, event: Ending) -> None:
        """See `EngineModel`. A commit must have brought every wanted entry."""
        label, leg = label_of(event), self.legs.get(event.key)
        if label in self.quiet:
            self.world.fail("released_twice", f"{self.process.name} was told twice how {label} ended")
        self.quiet.add(label)
        if leg is None:
            return
        if leg.failed and not isinstance(event, DecodeReleased):
            self.world.fail("commit_after_failure", f"{label} failed on {self.process.name}, and then {event}")
        if isinstance(event, DecodeCommitted):
            self._check_commit(leg, event.seeds)
        elif isinstance(event, DecodeFinished) and event.seeds != self.process.cluster.seeds.get(label):
            self.world.fail("wrong_seeds", f"{label} finished with {event.seeds}")
        for group, pages in leg.pages.items():
            memory = self.memory(group)
            for page in pages:
                if memory.pages[page].writer == label:
                    memory.pages[page].writer = None

    def _check_commit(self, leg: Leg, seeds: Seeds) -> None:
        label = str(leg.key)
        if seeds != self.process.cluster.seeds.get(label):
            self.world.fail("wrong_seeds", f"{label} was committed with {seeds}")
        for group, tokens in leg.wanted.items():
            bad = self.memory(group).wrong(leg.story, leg.pages[group], tokens.start, tokens.stop)
            if bad is not None:
                self.world.fail(
                    "early_commit",
                    f"{label} was committed on {self.process.name}, but token {bad} of {group} (wanted {tokens}) "
                    f"does not hold its final entry",
                )

    def agent_has_run(self) -> None:
        """See `EngineModel`: nobody waits for a handoff beyond its deadline."""
        now, grace = self.process.clock.monotonic(), 2 * self.process.config.timers.check + 0.05
        for leg in self.legs.values():
            if leg.state != "receiving" or leg.deadline > now or leg.failed or str(leg.key) in self.quiet:
                continue
            if leg.late_since is None or leg.late_since < self.process.resumed:
                leg.late_since = now
            elif now > leg.late_since + grace:
                self.world.fail(
                    "deadline", f"{leg.key} waits on {self.process.name} for longer than a handoff may take"
                )

    def handle(self, event: HandoffEvent) -> None:
        """See `EngineModel`."""
        leg = self.legs.get(event.key)
        if leg is None:
            self.world.fail("unknown_event", f"{self.process.name} has no leg {event.key}: {event}")
            return
        if isinstance(event, DecodeAdmitted):
            leg.admitted = True
            self._queue(leg)
            return
        if isinstance(event, DecodeFailed):
            self._failed(leg, event)
            return
        if isinstance(event, DecodeProgress):
            self._progress(leg, event.proven)
            return
        if isinstance(event, DecodeCommitted) and leg.state == "receiving":
            self._commit(leg, event.seeds)
            return
        del self.legs[leg.key]
        if isinstance(event, DecodeFinished) and leg.state in _OPEN:
            leg.stream.tokens(leg.num_known, [event.seeds.first_token])
            self.end(leg, "stop")
        for group, proven in leg.proven.items():
            # Verified pages serve the recomputation, and other requests.
            if group not in leg.uncached:
                self.memory(group).cache(leg.story, leg.pages[group], proven)
        self.free(leg)

    def _progress(self, leg: Leg, proven: dict[str, int]) -> None:
        """Some of the wanted entries are here and verified, whatever becomes of the rest."""
        for group, stop in proven.items():
            start = leg.wanted[group].start
            bad = self.memory(group).wrong(leg.story, leg.pages[group], start, stop)
            if bad is not None:
                self.world.fail("false_proof", f"{leg.key}: token {bad} of {group} was called proven")
        leg.proven = proven

    # ------------------------------------------------------------ failure and recomputation

    def _failed(self, leg: Leg, event: DecodeFailed) -> None:
        if leg.state not in _OPEN:
            return
        leg.state = "quarantined"
        if event.recoverable and self.world.settings.recovery in ("recompute", "full"):
            again = Leg(
                leg.story, leg.num_known, leg.ticket, leg.stream, leg.deadline, f"{leg.holder} again", "recomputing"
            )
            self.process.cluster.rungs["recompute"] += 1
            leg.stream.request.rungs.add("recompute")
            leg.stream.leg = again
            self.recomputing.append(again)
        else:
            self.end(leg, event.reason, event.recoverable)

    def _drop_recompute(self, leg: Leg) -> None:
        for again in [again for again in self.recomputing if again.stream is leg.stream]:
            self.recomputing.remove(again)
            self.free(again)

    def _recompute(self, leg: Leg) -> None:
        """One step of a leg that prefills here what it did not get, then decodes on."""
        n = leg.num_known
        if not leg.pages:
            hits = self.hits(leg)
            common = min([n - 1, *hits.values()])
            if not self.allocate(leg, dict.fromkeys(hits, common), len(leg.story) + self.num_drafts):
                if self.process.clock.monotonic() > leg.deadline + self.world.settings.patience:
                    self.recomputing.remove(leg)
                    self.end(leg, "no_room")
                return
            self.begin(leg, common)
        if leg.computed < n:
            stop = min(n, leg.computed + self.world.random.randint(2, max(10, n // 3)))
            self.compute(leg, leg.computed, stop, drafted=n if stop == n else stop - 1)
            if stop == n:
                leg.stream.tokens(n, [leg.story.tokens[n]])
        elif self._decode(leg):
            self.recomputing.remove(leg)

    # ------------------------------------------------------------ admission and decoding

    def step(self) -> bool:
        """See `EngineModel`."""
        for leg in list(self.legs.values()):
            if leg.state == "waiting" and not self._admit(leg):
                break
        for leg in list(self.legs.values()):
            if leg.state == "running" and self._decode(leg):
                del self.legs[leg.key]
        for leg in list(self.recomputing):
            self._recompute(leg)
        return bool(self.recomputing) or any(leg.state in ("waiting", "running") for leg in self.legs.values())

    def _admit(self, leg: Leg) -> bool:
        n, hits = leg.num_known, self.hits(leg)
        if not self.allocate(leg, hits, len(leg.story) + self.num_drafts):
            return False
        for memory in self.process.memories:
            group, table = memory.model, leg.pages[memory.model.name]
            interval = group.rules.wanted(n, hits[group.name])
            leg.wanted[group.name] = interval
            if group.window is not None:
                # Pages that no later query sees are null.
                seen_from = group.rules.first_needed(n)
                outside = min(seen_from // memory.page_size, len(table))
                if interval.start > hits[group.name]:
                    # What lies before the window was not brought, so that no page of it serves another prompt.
                    leg.uncached.add(group.name)
                memory.release(table[:outside], leg.holder)
                table[:outside] = [NULL_PAGE] * outside
            if interval.start < interval.stop:
                first, last = interval.start // memory.page_size, (interval.stop - 1) // memory.page_size
                for page in table[first : last + 1]:
                    memory.pages[page].writer = str(leg.key)
        leg.state = "receiving"
        leg.deadline = self.process.clock.monotonic() + self.world.settings.timers.handoff
        tables = {group: list(table) for group, table in leg.pages.items()}
        intervals = dict(leg.wanted)

        def register() -> None:
            # A handoff's time counts from REGISTER on, and the process may have been paused before it took this call.
            leg.deadline = self.process.clock.monotonic() + self.world.settings.timers.handoff
            self.process.node.open_decode(leg.ticket, intervals, tables)

        self.process.call(register)
        return True

    def _commit(self, leg: Leg, seeds: Seeds) -> None:
        leg.state = "running"
        self.begin(leg, leg.num_known)
        self.cache(leg)
        leg.stream.tokens(leg.num_known, [seeds.first_token])

    def _decode(self, leg: Leg) -> bool:
        """One step: verify some guesses; True when the request has ended, its pages are then free."""
        story, at = leg.story, leg.computed
        if at + 1 < len(story):
            count = min(1 + self.world.random.randint(0, self.num_drafts), len(story) - 1 - at)
            self.compute(leg, at, at + count, drafted=at + count)
            leg.stream.tokens(at + 1, story.tokens[at + 1 : at + 1 + count])
        if leg.computed + 1 < len(story):
            return False
        self.end(leg, "stop")
        self.cache(leg)
        self.free(leg)
        return True
