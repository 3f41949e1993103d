"""Pages of a prefix that moves between two caches of other page sizes."""

from __future__ import annotations

import pytest

from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.interval import Interval
from baton.kv.moved_prefix import SharedPrefix, attach_prefix, enter_prefix, prefix_multiple, share_prefix
from baton.kv.page_pool import PagePool
from tests.kv.test_cache import WINDOW, Memory, received
from tests.kv.test_states import GROUPS, INTERVAL, Kept

TOKENS = list(range(40))


def move(source: Memory, shared: BlockTables, other: Memory, moved: BlockTables, wanted: dict[str, Interval]) -> None:
    """Copy the wanted entries. The source must have them all."""
    for name, interval in wanted.items():
        size, theirs = other.cache.pools[name].page_size, source.cache.pools[name].page_size
        for entry in range(interval.start, interval.stop):
            page, far = moved.pages[name][entry // size], shared.pages[name][entry // theirs]
            assert page
            assert far, "the source lacks it"
            other.cells[name, page, entry % size] = source.cells[name, far, entry % theirs]


@pytest.mark.parametrize("received_to", [0, 12])
@pytest.mark.parametrize("num_tokens", range(1, 39))
def test_the_next_request_starts_from_what_was_moved(num_tokens: int, received_to: int) -> None:
    """Also if the source got its beginning by a handoff: of the window only what the next query saw."""
    source, other = Memory(30), Memory(40, sizes={"target": 3, "window": 5, "draft": 2})
    if received_to:
        source.cache.release(received(source, TOKENS, received_to))
    else:
        source.run(TOKENS)
    shared, before = BlockTables(), source.cache.pools["target"].num_available
    prefix = share_prefix(source.cache, shared, TOKENS, num_tokens)
    held = prefix.num_tokens
    least = 13 if received_to else 0  # of the source's window, the first whole page begins at 9
    assert held == (min(num_tokens, 36) if num_tokens >= least else 0), "whole pages of all groups"
    assert source.copied == [], "it only reads"
    assert source.cache.pools["target"].num_available == before - -(-held // 4)
    if not held:
        return
    whole, start = min(held // size * size for size in (3, 5, 2)), prefix.window_start
    moved = BlockTables()
    destination = attach_prefix(other.cache, moved, TOKENS, prefix)
    first = max(0, whole - WINDOW + 1) // 5 * 5
    assert (destination is None) is (first < start)
    if destination is None:
        assert held < 16, "only a little after the handoff"
        return
    assert destination.wanted["target"] == Interval(0, held // 3 * 3)
    assert destination.wanted["window"] == Interval(first, held // 5 * 5), "no more than the next query needs"
    move(source, shared, other, moved, destination.wanted)
    assert enter_prefix(other.cache, moved, TOKENS, held) == whole
    for cache, tables in ((source.cache, shared), (other.cache, moved)):
        cache.release(tables)
        assert all(pool.num_referenced == 0 for pool in cache.pools.values())
    tables = BlockTables()
    hit = other.cache.attach(tables, TOKENS, 39, 39)
    assert hit == whole
    other.check(tables, TOKENS, hit)


def test_cached_entries_are_not_moved_again() -> None:
    memory = Memory()
    memory.run(TOKENS[:14])
    destination = attach_prefix(memory.cache, BlockTables(), TOKENS, SharedPrefix(24))
    assert destination is not None
    assert destination.wanted == {"target": Interval(12, 24), "window": Interval(18, 24), "draft": Interval(12, 24)}
    destination = attach_prefix(memory.cache, BlockTables(), TOKENS, SharedPrefix(12, 9))
    assert destination is not None
    assert all(interval.empty for interval in destination.wanted.values()), "the source lacks what is here"


def test_requests_keep_half_of_what_is_free() -> None:
    memory = Memory(num_pages=13)  # 12 of the target's pages are free, and each is for 4 tokens
    tokens = list(range(60))
    assert attach_prefix(memory.cache, BlockTables(), tokens, SharedPrefix(28)) is None
    assert {pool.num_referenced for pool in memory.cache.pools.values()} == {0}, "nothing was taken"
    assert attach_prefix(memory.cache, BlockTables(), tokens, SharedPrefix(16)) is not None


def test_a_state_moves_only_to_where_there_is_a_checkpoint() -> None:
    cache = KVCache(GROUPS, {"kv": 40, "state": 13}, 2, lambda *_: None, checkpoint_tokens=INTERVAL)
    assert attach_prefix(cache, BlockTables(), TOKENS, SharedPrefix(INTERVAL + 1)) is None
    for wanted in (Interval(0, 1), Interval(1, 1)):  # the second time it is there
        tables = BlockTables()
        destination = attach_prefix(cache, tables, TOKENS, SharedPrefix(2 * INTERVAL))
        assert destination is not None
        assert destination.wanted["state"] == wanted
        assert enter_prefix(cache, tables, TOKENS, 2 * INTERVAL) == 2 * INTERVAL
        cache.release(tables)
        assert cache.pools["state"].num_referenced == 0


@pytest.mark.parametrize(("multiple", "length"), [(1, 39), (3, 39), (4, 36), (5, 30), (7, 0), (12, 36)])
def test_a_state_goes_to_where_the_destination_has_whole_pages(multiple: int, length: int) -> None:
    """Not at the last checkpoint, if pages of another size end elsewhere."""
    kept, tokens = Kept(), list(range(41))
    kept.cache.release(kept.prefill(tokens[:40])[0])
    tables = BlockTables()
    assert share_prefix(kept.cache, tables, tokens, 40, multiple).num_tokens == length
    assert not length or kept.seen[tables.pages["state"][0]] == length
    kept.cache.release(tables)
    assert {pool.num_referenced for pool in kept.cache.pools.values()} == {0}


def test_only_states_bind_the_end_of_a_prefix() -> None:
    assert prefix_multiple(Memory().cache) == 1
    assert prefix_multiple(Kept().cache) == 3


def test_an_engine_with_nothing_shares_nothing() -> None:
    memory = Memory()
    assert share_prefix(memory.cache, BlockTables(), TOKENS, 20) == SharedPrefix(0)
    assert {pool.num_referenced for pool in memory.cache.pools.values()} == {0}


def test_a_pool_knows_which_pages_came_from_elsewhere() -> None:
    pool = PagePool(8, 4)
    pages = pool.allocate(4)
    pool.receive([0, pages[2]])
    pool.copied(pages[2], pages[1])
    pool.copied(pages[3], pages[0])
    assert [pool.num_computed(held) for held in (pages, pages[1:], pages[:1], [0])] == [1, 0, 1, 0]
    pool.release(pages)
    assert pool.num_computed(pool.allocate(7)) == 7
