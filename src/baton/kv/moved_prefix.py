"""Prefixes that move from one engine's prefix cache into another's: the pages of both sides.

The source shares cached pages, so it never waits for any. The destination takes exclusive pages for whole pages of the
prefix only, which become cached when all bytes are there. A drafter's last entries depend on known tokens too, because
the prompt goes on after the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.cache import KVCache
from baton.kv.interval import Interval
from baton.kv.states import StatePool
from baton.kv.tables import BlockTables, Destination


def share_prefix(cache: KVCache, tables: BlockTables, tokens: Sequence[int], most: int) -> int:
    """Give `tables` the cached pages of the longest prefix of at most `most` tokens that all groups hold. Returns its
    length in tokens. `most` is less than the number of `tokens`."""
    found = cache.find(tables, tokens, most + 1)
    num_tokens = min(hit.num_tokens for hit in found.values())
    if num_tokens:
        for name, pool in cache.pools.items():
            pages = found[name].pages[: cache.rules[name].num_pages(num_tokens, pool.page_size)]
            pool.share(pages)
            tables.set_pages(name, pages)
    return num_tokens


def attach_prefix(cache: KVCache, tables: BlockTables, tokens: Sequence[int], num_tokens: int) -> Destination | None:
    """Give `tables` the cached pages of a prefix of `num_tokens` tokens, and exclusive ones for what is missing: only
    whole pages, and a state only at a checkpoint. A window's entries are all wanted, because a prefix hit needs them.

    A prefix takes at most half of the pages that are free or evictable. Returns None, without changes, if that is too
    little, or if the prefix ends where this engine has no checkpoint.
    """
    hits: dict[str, int] = {}
    wanted: dict[str, Interval] = {}
    held: dict[str, list[int]] = {}
    fresh: dict[str, int] = {}
    for name, pool in cache.pools.items():
        if isinstance(pool, StatePool):
            if num_tokens % pool.interval:
                return None
            hit = pool.lookup(tokens, num_tokens, tables.chains[name])
            is_held = hit.num_tokens == num_tokens
            hits[name], held[name], fresh[name] = num_tokens * is_held, hit.pages * is_held, int(not is_held)
            wanted[name] = Interval(int(is_held), 1)
        else:
            size = pool.page_size
            num_held = pool.lookup(tokens, num_tokens, tables.chains[name]).num_tokens // size
            hits[name], fresh[name] = num_held * size, num_tokens // size - num_held
            held[name] = pool.lookup(tokens, hits[name], tables.chains[name]).pages
            wanted[name] = Interval(hits[name], num_tokens // size * size)
        if fresh[name] > (pool.num_available - pool.count_evictable(held[name])) // 2:
            return None
    for name, pool in cache.pools.items():
        pool.share(held[name])
        pages = held[name] + pool.allocate(fresh[name], held[name][-1] if held[name] else None)
        tables.set_pages(name, pages)
        tables.entered[name] = len(held[name])
    return Destination(hits, wanted)


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
