"""Pages of prefixes that move between engines' prefix caches (docs/protocol.md, "Prefixes").

A drafter's last entries depend on known tokens too, because the prompt goes on after the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.kv.block_tables import BlockTables, Destination
from baton.kv.cache import KVCache
from baton.kv.geometry import NULL_PAGE
from baton.kv.interval import Interval
from baton.kv.page_pool import PagePool
from baton.kv.state_pool import StatePool
from baton.kv.windows import WindowPool

# Entries of a window that the source shares besides the next query's: the destination starts earlier, where all of its
# groups have whole pages.
SPARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that a source holds. `window_start`: the first entry that it has of its windows; 0: all."""

    num_tokens: int
    window_start: int = 0


def prefix_multiple(cache: KVCache) -> int:
    """As `EngineInfo.prefix_multiple`."""
    has_states = any(isinstance(pool, StatePool) for pool in cache.pools.values())
    return cache.whole_pages if has_states else 1


def share_prefix(
    cache: KVCache, tables: BlockTables, tokens: Sequence[int], most: int, multiple: int = 1
) -> SharedPrefix:
    """Give `tables` the cached pages of the longest prefix of at most `most` tokens, a multiple of `multiple`, that all
    groups hold. If it is empty, nothing is changed. `most` is less than the number of `tokens`."""
    num_tokens, rest = most, 1
    while rest:
        hits = cache.find(tables, tokens, num_tokens + 1, SPARE_TOKENS)
        num_tokens = min(hit.num_tokens for hit in hits.values())
        rest = num_tokens % multiple
        num_tokens -= rest
    if not num_tokens:
        return SharedPrefix(0)
    window_start = 0
    for name, pool in cache.pools.items():
        pages = hits[name].pages[: cache.rules[name].num_pages(num_tokens, pool.page_size)]
        window_start = max(window_start, pages.count(NULL_PAGE) * pool.page_size)
        pool.share(pages)
        tables.set_pages(name, pages)
    return SharedPrefix(num_tokens, window_start)


@dataclass(frozen=True, slots=True)
class _Part:
    """A destination's pages for a prefix in one group: `held` pages that it has (null if not needed), number of `fresh`
    pages after them, and the wanted entries."""

    held: list[int]
    fresh: int
    wanted: Interval


def attach_prefix(
    cache: KVCache, tables: BlockTables, tokens: Sequence[int], prefix: SharedPrefix
) -> Destination | None:
    """Give `tables` the cached pages of a prefix, and exclusive ones for what is missing.

    Requests come first: a prefix takes at most half of the pages that are free or evictable. Returns None, without
    changes, if that is too little, if the prefix ends where this engine has no checkpoint, or if the source lacks a
    part of a window.
    """
    parts: dict[str, _Part] = {}
    for name, pool in cache.pools.items():
        part = _part(cache, name, tables, tokens, prefix)
        if part is None or part.fresh > (pool.num_available - pool.count_evictable(part.held)) // 2:
            return None
        parts[name] = part
    for name, pool in cache.pools.items():
        part = parts[name]
        pool.share(part.held)
        last = part.held[-1] if part.held else NULL_PAGE
        tables.set_pages(name, part.held + pool.allocate(part.fresh, last or None))
        tables.entered[name] = len(part.held)
    wanted = {name: part.wanted for name, part in parts.items()}
    return Destination({name: interval.start for name, interval in wanted.items()}, wanted)


def _part(cache: KVCache, name: str, tables: BlockTables, tokens: Sequence[int], prefix: SharedPrefix) -> _Part | None:
    pool, chain = cache.pools[name], tables.chains[name]
    num_tokens, size = prefix.num_tokens, pool.page_size
    if isinstance(pool, StatePool):
        if num_tokens % pool.step:
            return None
        hit = pool.lookup(tokens, num_tokens, chain)
        is_held = hit.num_tokens == num_tokens
        return _Part(hit.pages * is_held, int(not is_held), Interval(int(is_held), 1))
    stop = num_tokens // size
    if isinstance(pool, WindowPool):
        first = cache.rules[name].first_needed(_whole_pages(cache.pools.values(), num_tokens)) // size
        held = [NULL_PAGE] * first + pool.held_from(tokens, first, stop, chain)
        if len(held) * size < prefix.window_start and len(held) < stop:
            return None
    else:
        num_held = pool.lookup(tokens, num_tokens, chain).num_tokens // size
        held = pool.lookup(tokens, num_held * size, chain).pages
    return _Part(held, stop - len(held), Interval(len(held) * size, stop * size))


def _whole_pages(pools: Iterable[PagePool], num_tokens: int) -> int:
    """How many of `num_tokens` tokens are in whole pages of all groups."""
    return min(num_tokens // pool.page_size * pool.page_size for pool in pools)


def enter_prefix(cache: KVCache, tables: BlockTables, tokens: Sequence[int], num_tokens: int) -> int:
    """The wanted entries of `attach_prefix` are in place. Returns how many tokens a request with this prompt finds
    now."""
    for name, pool in cache.pools.items():
        pages, num_held = tables.pages[name], tables.entered[name]
        pool.receive(pages[num_held:])
        if not isinstance(pool, StatePool):
            pool.cache(tokens, pages, tables.chains[name], len(pages) * pool.page_size, num_held)
        elif not num_held:
            pool.enter(tokens, num_tokens, pages[0], tables.chains[name])
    return min(hit.num_tokens for hit in cache.find(tables, tokens, num_tokens + 1).values())
