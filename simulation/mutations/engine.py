"""Mutations of the engine: which entries are final, cached, and freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.legs.leg import Leg
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.engine.step import StepRunner
from baton.kv import page_pool, prefix
from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.hits import look_up
from baton.kv.interval import Rules
from simulation.mutations.registry import Patch, around_method, mutation

# ---------------------------------------------------------------- final entries


@mutation("an entry of module j is final only when the j-th token after it is known")
def _final_too_early() -> list[Patch]:
    original = Rules.final

    def final(self: Rules, n: int, computed: int, *, seeded: bool = False) -> int:
        return min(computed, n) if self.reach else original(self, n, computed, seeded=seeded)

    return [(Rules, "final", final)]


@mutation("a state is final when all tokens went through it")
def _state_clipped_by_tokens() -> list[Patch]:
    original = Rules.final

    def final(self: Rules, n: int, computed: int, *, seeded: bool = False) -> int:
        return min(computed, 1) if self.kind == "state" else original(self, n, computed, seeded=seeded)

    return [(Rules, "final", final)]


@mutation("nothing is declared before the drafter has run")
def _first_token_before_draft() -> list[Patch]:
    original = StepRunner._draft

    def draft(self: StepRunner, draft_rows: Sequence[Any]) -> Any:
        for rows in draft_rows:
            if rows.request.role == "prefill":
                rows.request.num_drafted = rows.stop
                assert self.legs is not None
                self.legs.declare(rows.request)
        return original(self, draft_rows)

    return [(StepRunner, "_draft", draft)]


# ---------------------------------------------------------------- the prefix cache


@mutation("an engine that computes starts where all its groups can")
def _hit_not_common() -> list[Patch]:
    def attach(self: KVCache, tables: BlockTables, tokens: Sequence[int], num_tokens: int, num_rows: int) -> int | None:
        found = look_up(self.pools, tables, tokens, num_tokens - 1)
        hits = {name: hit.num_tokens for name, hit in found.items()}
        start = min(hits.values())
        stop = max(start + min(num_rows, num_tokens - start), *hits.values())
        return start if self._take(tables, found, hits, stop) else None

    return [(KVCache, "attach", attach)]


@mutation("only what no step writes any more enters the prefix cache")
def _advance_caches_unfinal() -> list[Patch]:
    original = KVCache.num_final

    def num_final(
        self: KVCache, group: str, num_known: int, computed: int, drafted: int, *, seeded: bool = False
    ) -> int:
        if seeded:
            return original(self, group, num_known, computed, drafted, seeded=True)
        return original(self, group, num_known, min(computed + 1, num_known), drafted)

    return [(KVCache, "num_final", num_final)]


@mutation("a drafter's page is known by the tokens behind it too")
def _identity_without_reach() -> list[Patch]:
    original = prefix.page_identity
    return [(page_pool, "page_identity", lambda tokens, page, size, reach: original(tokens, page, size, 0))]


@mutation("of a failed handoff only what digests have proven is kept")
def _unproven_is_kept() -> list[Patch]:
    original = KVCache.leave_quarantine

    def leave(self: KVCache, held: BlockTables, tokens: Sequence[int], proven: Mapping[str, int]) -> None:
        original(self, held, tokens, dict.fromkeys(self.pools, len(tokens)))

    return [(KVCache, "leave_quarantine", leave)]


# ---------------------------------------------------------------- freeing pages


@mutation("a window's pages are free when no later query sees them")
def _window_freed_too_early() -> list[Patch]:
    def slide(self: KVCache, tables: BlockTables, known: int, computed: int, drafted: int, first: int = 0) -> None:
        for name in self._windowed:
            self._free_before(tables, name, self.rules[name].first_needed(computed) + self.pools[name].page_size)

    return [(KVCache, "slide", slide)]


@mutation("the state that goes on is the one behind the last accepted draft")
def _first_state_goes_on() -> list[Patch]:
    original = KVCache.accept
    return [(KVCache, "accept", lambda self, tables, num_accepted, *more: original(self, tables, 0, *more))]


@mutation("P's pages stay until the agent lets them go, whatever became of the request")
def _release_before_quiet() -> list[Patch]:
    original = HandoffLegs.abort_leg

    def keeps(self: HandoffLegs, request: Request, error: str | None) -> bool:
        original(self, request, error)
        return False

    def around(self: HandoffLegs, abandon: Any, request: Request) -> None:
        abandon(request)
        self.scheduler.release(request)

    return [(HandoffLegs, "abort_leg", keeps), *around_method(HandoffLegs, "abandon", around)]


@mutation("pages that a peer may still write go into quarantine")
def _no_quarantine() -> list[Patch]:
    def around(self: HandoffLegs, quarantine: Any, leg: Leg) -> None:
        self.scheduler.release(leg.request)

    return around_method(HandoffLegs, "_quarantine", around)


@mutation("who is preempted gives up its pages")
def _preempt_keeps_pages() -> list[Patch]:
    original = Scheduler.preempt

    def preempt(self: Scheduler, request: Request) -> None:
        pages = request.kv.take()
        original(self, request)
        del pages

    return [(Scheduler, "preempt", preempt)]
