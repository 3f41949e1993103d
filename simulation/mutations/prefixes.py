"""Mutations of hand-backs: prefixes that go from one engine's cache into another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.legs import prefix_legs
from baton.engine.legs.prefix_legs import PrefixLegs
from baton.engine.request import Request
from baton.kv import moved_prefix
from baton.kv.block_tables import BlockTables, Destination
from baton.kv.cache import KVCache
from baton.kv.moved_prefix import SharedPrefix
from baton.kv.windows import WindowPool
from simulation.mutations.registry import Patch, mutation


@mutation("a source keeps the pages of a prefix until the handoff lets go of them")
def _offered_prefixes_are_evictable() -> list[Patch]:
    original = PrefixLegs.offer

    def offer(self: PrefixLegs, request: Request) -> None:
        original(self, request)
        self._cache.release(request.kv)

    return [(PrefixLegs, "offer", offer)]


@mutation("a prefix is in the cache of its destination only when all of it has arrived")
def _prefixes_are_found_early() -> list[Patch]:
    original = moved_prefix.attach_prefix

    def attach_prefix(
        cache: KVCache, tables: BlockTables, tokens: Sequence[int], prefix: SharedPrefix
    ) -> Destination | None:
        found = original(cache, tables, tokens, prefix)
        if found is not None:
            moved_prefix.enter_prefix(cache, tables, tokens, prefix.num_tokens)
        return found

    return [(prefix_legs, "attach_prefix", attach_prefix)]


@mutation("a source offers what all of its groups hold, and no token more")
def _prefixes_are_longer() -> list[Patch]:
    original = PrefixLegs.hold

    def hold(self: PrefixLegs, request: Request) -> bool:
        held = original(self, request)
        if held and request.prefix_len is not None and request.prefix_len + 1 < request.num_prompt:
            request.prefix_len = request.prefill_len = request.prefix_len + 1
        return held

    return [(PrefixLegs, "hold", hold)]


@mutation("a destination wants a prefix from the first entry that it lacks")
def _prefixes_begin_a_page_late() -> list[Patch]:
    original = moved_prefix.attach_prefix

    def attach_prefix(
        cache: KVCache, tables: BlockTables, tokens: Sequence[int], prefix: SharedPrefix
    ) -> Destination | None:
        found = original(cache, tables, tokens, prefix)
        if found is None:
            return None
        late = {
            name: entries if cache.rules[name].kind == "state" else entries.after(entries.start + size)
            for name, entries in found.wanted.items()
            for size in [cache.pools[name].page_size]
        }
        return replace(found, wanted=late)

    return [(prefix_legs, "attach_prefix", attach_prefix)]


@mutation("a hit that begins with missing pages has a whole window, wherever the request starts")
def _windows_are_cut_short() -> list[Patch]:
    return [(WindowPool, "_min_start", lambda *_: 0)]
