"""Mutations of the rules of windows, states, and page sizes per group."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from baton.engine import planning
from baton.engine.step_plans import DraftSlots
from baton.handoff.plan import planner
from baton.kv.block_tables import BlockTables, Destination
from baton.kv.cache import KVCache
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval, Rules
from baton.kv.spec import Owner
from simulation.mutations.registry import Patch, mutation


@mutation("each side's pages have the size that it says, in each group")
def _one_page_size() -> list[Patch]:
    original = planner._segments

    def segments(tokens: Interval, have: Geometry, to: Geometry, *tables: Any) -> Any:
        return original(tokens, msgspec.structs.replace(have, page_size=to.page_size), to, *tables)

    return [(planner, "_segments", segments)]


@mutation("a window is wanted from the first token on that the next query sees")
def _window_wanted_too_late() -> list[Patch]:
    original = Rules.wanted

    def wanted(self: Rules, n: int, hit: int) -> Interval:
        found = original(self, n, hit)
        return found.after(found.start + 1) if self.window is not None and len(found) > 1 else found

    return [(Rules, "wanted", wanted)]


def _attaching(alter: Callable[[KVCache, BlockTables, Destination | None], Destination | None]) -> list[Patch]:
    """`alter` gets the cache, the request's tables and what `attach_destination` found, and returns it altered."""
    original = KVCache.attach_destination

    def attach(
        self: KVCache,
        tables: BlockTables,
        tokens: Sequence[int],
        num_tokens: int,
        sent_groups: Container[str] | None = None,
    ) -> Destination | None:
        return alter(self, tables, original(self, tables, tokens, num_tokens, sent_groups))

    return [(KVCache, "attach_destination", attach)]


@mutation("tokens that D holds say nothing of a state")
def _state_clipped_by_hit() -> list[Patch]:
    def clip(cache: KVCache, tables: BlockTables, found: Destination | None) -> Destination | None:
        if found is None or not any(found.hits.values()):
            return found
        clipped = {name: Interval(1, 1) for name, rules in cache.rules.items() if rules.kind == "state"}
        return Destination(found.hits, found.wanted | clipped)

    return _attaching(clip)


@mutation("a page in which a received window begins is no page of a prefix")
def _windows_begin_within_a_page() -> list[Patch]:
    def enter(cache: KVCache, tables: BlockTables, found: Destination | None) -> Destination | None:
        tables.entered = {
            name: first if cache.rules[name].window is None else 0 for name, first in tables.entered.items()
        }
        return found

    return _attaching(enter)


@mutation("slots that a verification writes are shown to nobody")
def _scratch_slot_is_sent() -> list[Patch]:
    original = KVCache.offered

    def offered(self: KVCache, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        return {**original(self, tables, num_tokens), **{name: slots[:1] for name, slots in tables.scratch.items()}}

    return [(KVCache, "offered", offered)]


@mutation("the state that a drafter goes on from has seen known tokens alone")
def _draft_state_has_seen_drafts() -> list[Patch]:
    original = KVCache.accept

    def accept(
        self: KVCache, tables: BlockTables, num_accepted: int, num_computed: int, owner: Owner = "target"
    ) -> None:
        of_drafts = owner == "draft" and all(len(tables.scratch[name]) > 1 for name in self._states_of["draft"])
        original(self, tables, num_accepted + of_drafts, num_computed, owner)

    return [(KVCache, "accept", accept)]


@mutation("states behind drafts have slots of their own")
def _drafts_go_over_the_state() -> list[Patch]:
    original = planning._draft_slots

    def slots(draft_rows: Sequence[Any], group: str) -> DraftSlots:
        found = original(draft_rows, group)
        return replace(found, scratch=np.repeat(found.scratch[:, :1], found.scratch.shape[1], axis=1))

    return [(planning, "_draft_slots", slots)]
