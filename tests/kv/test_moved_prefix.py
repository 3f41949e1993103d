"""Pages of a prefix that moves between two caches of other page sizes."""

from __future__ import annotations

import pytest

from baton.kv.cache import KVCache
from baton.kv.interval import Interval
from baton.kv.moved_prefix import attach_prefix, enter_prefix, share_prefix
from baton.kv.pool import PagePool
from baton.kv.tables import BlockTables
from tests.kv.test_cache import Memory
from tests.kv.test_states import GROUPS, INTERVAL

TOKENS = list(range(31))


@pytest.mark.parametrize("num_tokens", range(1, 30))
def test_the_next_request_starts_from_what_was_moved(num_tokens: int) -> None:
    source, other = Memory(), Memory(40, sizes={"target": 3, "window": 5, "draft": 2})
    source.run(TOKENS)
    shared, before = BlockTables(), source.cache.pools["target"].num_available
    held = share_prefix(source.cache, shared, TOKENS, num_tokens)
    assert held == min(num_tokens, 28), "the target has seven whole pages"
    assert source.copied == [], "it only reads"
    assert source.cache.pools["target"].num_available == before - -(-held // 4)
    moved = BlockTables()
    destination = attach_prefix(other.cache, moved, TOKENS, held)
    assert destination is not None
    for name, wanted in destination.wanted.items():
        size, theirs = other.cache.pools[name].page_size, source.cache.pools[name].page_size
        assert wanted == Interval(0, held // size * size), "a window's entries too"
        for entry in range(wanted.stop):
            page, far = moved.pages[name][entry // size], shared.pages[name][entry // theirs]
            other.cells[name, page, entry % size] = source.cells[name, far, entry % theirs]
    whole = min(held // size * size for size in (3, 5, 2))
    assert enter_prefix(other.cache, moved, TOKENS, held) == whole
    for cache, tables in ((source.cache, shared), (other.cache, moved)):
        cache.release(tables)
        assert all(pool.num_referenced == 0 for pool in cache.pools.values())
    tables = BlockTables()
    hit = other.cache.attach(tables, TOKENS, 30, 30)
    assert hit == whole
    other.check(tables, TOKENS, hit)


def test_what_is_held_already_is_not_moved_again() -> None:
    memory = Memory()
    memory.run(TOKENS[:14])
    destination = attach_prefix(memory.cache, BlockTables(), TOKENS, 24)
    assert destination is not None
    assert destination.wanted == {"target": Interval(12, 24), "window": Interval(12, 24), "draft": Interval(12, 24)}


def test_requests_keep_half_of_what_is_free() -> None:
    memory = Memory(num_pages=13)  # 12 of the target's pages are free, and each is for 4 tokens
    tokens = list(range(60))
    assert attach_prefix(memory.cache, BlockTables(), tokens, 28) is None
    assert {pool.num_referenced for pool in memory.cache.pools.values()} == {0}, "nothing was taken"
    assert attach_prefix(memory.cache, BlockTables(), tokens, 16) is not None


def test_a_state_moves_only_to_where_there_is_a_checkpoint() -> None:
    cache = KVCache(GROUPS, {"kv": 40, "state": 13}, 2, lambda *_: None, checkpoint_tokens=INTERVAL)
    assert attach_prefix(cache, BlockTables(), TOKENS, INTERVAL + 1) is None
    for wanted in (Interval(0, 1), Interval(1, 1)):  # the second time it is there
        tables = BlockTables()
        destination = attach_prefix(cache, tables, TOKENS, 2 * INTERVAL)
        assert destination is not None
        assert destination.wanted["state"] == wanted
        assert enter_prefix(cache, tables, TOKENS, 2 * INTERVAL) == 2 * INTERVAL
        cache.release(tables)
        assert cache.pools["state"].num_referenced == 0


def test_an_engine_with_nothing_shares_nothing() -> None:
    memory = Memory()
    assert share_prefix(memory.cache, BlockTables(), TOKENS, 20) == 0
    assert {pool.num_referenced for pool in memory.cache.pools.values()} == {0}


def test_a_pool_knows_which_pages_came_from_elsewhere() -> None:
    pool = PagePool(8, 4)
    pages = pool.allocate(4)
    pool.receive([0, pages[2]])
    pool.copied(pages[2], pages[1])
    pool.copied(pages[3], pages[0])
    assert [pool.num_computed(held) for held in (pages, pages[1:], pages[:1], [0])] == [1, 0, 1, 1]
    pool.release(pages)
    assert pool.num_computed(pool.allocate(7)) == 7
