"""The modelled engine that prefills."""

from __future__ import annotations

from baton.handoff.protocol.events import (
    Admitted,
    Declared,
    HandoffEvent,
    PrefillReleased,
    Sampled,
)
from baton.handoff.protocol.messages import Seeds
from simulation.engine import Ending, EngineModel, Leg, label_of


class PrefillEngine(EngineModel):
    """Takes legs in order of arrival, prefills in chunks, samples, drafts, and holds pages until released.

    A leg is `waiting`, `running`, `held` (computed) or `dropped` (given up; waiting for its release).
    """

    def start_leg(self, leg: Leg) -> None:
        """See `EngineModel`. The attempt is opened at once, so that an early REGISTER finds it."""
        if leg.key in self.legs:
            self.end(leg, "duplicate_leg")
            return
        self.legs[leg.key] = leg
        self.look_for_prefix(leg)
        self.process.call(lambda: self.process.node.open_prefill(leg.ticket))

    def abandon(self, leg: Leg) -> None:
        """See `EngineModel`."""
        if leg.state == "held" and not self.world.settings.has("client_abort"):
            # The router has its token; D may still be on its way.
            return
        self._give_up(leg, "aborted")

    def abort_any(self) -> bool:
        """See `EngineModel`."""
        legs = [leg for leg in self.legs.values() if leg.state != "dropped"]
        if legs:
            leg = self.world.random.choice(legs)
            self._give_up(leg, "failed")
            self.end(leg, "engine_failed", recoverable=True)
        return bool(legs)

    def _give_up(self, leg: Leg, reason: str) -> None:
        if self.legs.get(leg.key) is leg and leg.state != "dropped":
            leg.state = "dropped"
            self.process.call(lambda: self.process.node.abort(leg.key, reason))

    def proven_quiet(self, event: Ending) -> None:
        """See `EngineModel`."""
        label = label_of(event)
        if label in self.quiet:
            self.world.fail("released_twice", f"{self.process.name} was told twice that {label} is released")
        self.quiet.add(label)

    def handle(self, event: HandoffEvent) -> None:
        """See `EngineModel`."""
        assert isinstance(event, PrefillReleased)
        leg = self.legs.pop(event.key, None)
        if leg is None:
            self.world.fail("unknown_release", f"{self.process.name} has no leg {event.key}")
            return
        self.free(leg)
        failed = event.outcome not in ("committed", "finished")
        self.end(leg, f"handoff_failed:{event.outcome}" if failed else "handed_off", recoverable=True)

    def step(self) -> bool:
        """See `EngineModel`: admit what there is room for, and compute one chunk of one leg."""
        running = [leg for leg in self.legs.values() if leg.state == "running"]
        for leg in self.legs.values():
            if leg.state == "waiting" and leg.loaded and not self._admit(leg):
                break
        for leg in running:
            self._chunk(leg)
        return any(leg.state in ("waiting", "running") for leg in self.legs.values())

    def _admit(self, leg: Leg) -> bool:
        hits = self.hits(leg)
        # An engine that computes starts where all its groups can, and computes at least one token.
        common = min([leg.num_known - 1, *hits.values()])
        if not self.allocate(leg, dict.fromkeys(hits, common), leg.num_known + self.num_drafts + 1):
            return False
        self.begin(leg, common)
        leg.state = "running"
        self.process.call(lambda: self.process.node.to_prefill(leg.key, Admitted()))
        return True

    def _chunk(self, leg: Leg) -> None:
        n = leg.num_known
        stop = min(n, leg.computed + self.world.random.randint(1, max(8, n // 3)))
        last = stop == n
        # With the last chunk the token is sampled, and the drafter's entry n - 1 is computed with it.
        self.compute(leg, leg.computed, stop, drafted=n if last else stop - 1)
        if last:
            leg.stream.tokens(n, [leg.story.tokens[n]])
        rules = {memory.model.name: memory.model.rules for memory in self.process.memories}
        final = {group: rule.final(n, stop if rule.module == 0 else leg.drafted) for group, rule in rules.items()}
        self.cache(leg)
        pages = {group: list(table) for group, table in leg.pages.items()}
        declared = Declared(n, pages, final)
        self.process.call(lambda: self.process.node.to_prefill(leg.key, declared))
        if not last:
            return
        finished = n + 1 == len(leg.story)
        drafts = [] if finished else leg.story.guesses(n + 1, self.num_drafts, self.world.random)
        seeds = Seeds(leg.story.tokens[n], None, drafts)
        self.process.cluster.seeds[str(leg.key)] = seeds
        leg.state = "held"
        sampled = Sampled(seeds, finished, {group: rule.final(n, n, seeded=True) for group, rule in rules.items()})
        self.process.call(lambda: self.process.node.to_prefill(leg.key, sampled))
