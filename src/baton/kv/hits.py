"""Prefix hits of all groups together: each group's hit, cut to where all can begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.kv.block_tables import BlockTables
from baton.kv.page_pool import PagePool, PrefixHit

Hits = dict[str, PrefixHit]


def look_up(
    pools: Mapping[str, PagePool], tables: BlockTables, tokens: Sequence[int], limit: int, spare: int = 0
) -> Hits:
    """Reuses the last lookup while the prefix cache has not changed."""
    hits: Hits = {}
    for name, pool in pools.items():
        key = pool.version, limit, len(tokens), spare
        last = tables.found.get(name)
        if last is None or last[0] != key:
            last = tables.found[name] = key, pool.lookup(tokens, limit, tables.chains[name], spare)
        hits[name] = last[1]
    return hits


def agreed(
    pools: Mapping[str, PagePool], tables: BlockTables, tokens: Sequence[int], found: Hits, spare: int = 0
) -> Hits:
    """`found`, cut so that a request can start after the shortest hit."""
    return cut(pools, tables, tokens, found, min(hit.num_tokens for hit in found.values()), spare)


def cut(
    pools: Mapping[str, PagePool], tables: BlockTables, tokens: Sequence[int], found: Hits, most: int, spare: int = 0
) -> Hits:
    """`found`, cut so that a request can start after `most` tokens or the shortest hit. Hits with which it cannot are
    looked up again."""
    found = dict(found)
    while later := [name for name, hit in found.items() if hit.least > most]:
        for name in later:
            found[name] = pools[name].lookup(tokens, most, tables.chains[name], spare)
        most = min(most, *(hit.num_tokens for hit in found.values()))
    return found
