"""Page pool: exclusive states, contiguous runs, and a prefix cache that never serves another prompt's drafter KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import CapacityError
from baton.kv import page_pool
from baton.kv.page_pool import PagePool
from baton.kv.prefix import Chain, salted_root


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    pages = pool.allocate(-(-len(tokens) // pool.page_size))
    pool.cache(tokens, pages, Chain(), len(tokens) - pool.reach)
    return pages


def test_null_page_is_never_handed_out() -> None:
    pool = PagePool(9, 4)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    with pytest.raises(CapacityError):
        pool.allocate(1)


def test_allocation_continues_after_the_last_page_and_prefers_runs() -> None:
    pool = PagePool(33, 4)
    first = pool.allocate(3)
    second = pool.allocate(2)
    assert pool.allocate(2, after=second[-1]) == [second[-1] + 1, second[-1] + 2]
    pool.release(first)
    # The three free pages at the front do not fit five: a whole run further on does.
    pages = pool.allocate(5)
    assert pages == list(range(pages[0], pages[0] + 5))


def test_prefix_hit_is_exact_to_the_token() -> None:
    pool = PagePool(17, 4)
    tokens = list(range(100, 114))
    pages = fill(pool, tokens)
    hit = pool.lookup(tokens, 14)
    assert hit.num_tokens == 12
    assert hit.pages == pages[:3]
    other = [*tokens[:6], 7, 7, 7, 7]
    partial = pool.lookup(other, 10)
    assert partial.num_tokens == 6
    assert partial.pages == pages[:2]
    assert pool.lookup([1, 2, 3, 4], 4).num_tokens == 0


def test_requests_share_pages_with_those_of_their_salt_alone() -> None:
    pool, tokens = PagePool(17, 4), list(range(100, 114))
    pages = pool.allocate(4)
    pool.cache(tokens, pages, Chain(salted_root("a")), 14)
    assert pool.lookup(tokens, 14, Chain(salted_root("a"))).num_tokens == 12
    # The page after the last whole one may match in part: it has a root too.
    for tokens_asked in (tokens, tokens[:3]):
        for salt in (None, "b", ""):
            assert pool.lookup(tokens_asked, len(tokens_asked), Chain(salted_root(salt))).num_tokens == 0
    assert pool.lookup(tokens[:3], 3, Chain(salted_root("a"))).num_tokens == 3


def test_drafter_identity_includes_the_token_after_the_page() -> None:
    """Entry 3 of a drafter page of 4 depends on token 4: prompts that differ only there share entries 0..2."""
    pool = PagePool(17, 4, reach=1)
    fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9], 8).num_tokens == 8
    assert pool.lookup([1, 2, 3, 4, 99, 6, 7, 8, 9], 8).num_tokens == 3
    target = PagePool(17, 4)
    fill(target, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert target.lookup([1, 2, 3, 4, 99, 6, 7, 8, 9], 8).num_tokens == 4


def test_quarantined_pages_are_not_reused_until_quiet() -> None:
    pool = PagePool(5, 4)
    pages = pool.allocate(4)
    pool.release(pages, quarantine=True)
    assert pool.num_quarantined == 4
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.leave_quarantine(pages)
    pool.leave_quarantine(pages)
    assert pool.num_available == 4


def test_eviction_is_least_recently_used_and_forgets_the_hash() -> None:
    pool = PagePool(5, 2)
    first = fill(pool, [1, 2, 3, 4])
    pool.release(first)
    second = fill(pool, [5, 6, 7, 8])
    pool.release(second)
    pool.share(pool.lookup([5, 6], 2).pages)
    pool.allocate(2)
    assert pool.lookup([1, 2, 3, 4], 4).num_tokens == 0
    assert pool.lookup([5, 6, 7, 8], 4).num_tokens == 4


def test_eviction_goes_ahead_in_the_order_of_use() -> None:
    pool = PagePool(201, 1)
    prompts = [[1000 * i + j for j in range(20)] for i in range(10)]
    for prompt in prompts:
        pool.release(fill(pool, prompt))
    pool.share(pool.lookup(prompts[0], 20).pages)
    pool.allocate(1)
    # One that is needed and 4 in advance, from the least recently used prompt: its last pages.
    assert [pool.lookup(prompt, 20).num_tokens for prompt in prompts] == [20, 15] + [20] * 8
    assert (pool.num_cached, pool.num_available) == (175, 179)
    pool.allocate(4)
    assert pool.num_cached == 175
    # All cached pages can be allocated.
    assert len(set(pool.allocate(175))) == 175
    with pytest.raises(CapacityError):
        pool.allocate(1)


def test_a_lookup_compares_few_pages_however_many_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of prompts that share their first page and differ in the second."""
    count = 5000
    pool = PagePool(count + 3, 4)
    first = pool.allocate(1)
    for branch in range(count):
        own = pool.allocate(1)
        pool.cache([1, 2, 3, 4, branch, 7, 7, 7], first + own, Chain(), 8)
        pool.release(own)
    compared = []
    whole = page_pool._common_prefix
    monkeypatch.setattr(page_pool, "_common_prefix", lambda *a: compared.append(a) or whole(*a))
    for branch in (0, 17, count - 1):
        assert pool.lookup([1, 2, 3, 4, branch, 7, 9, 9], 8).num_tokens == 6
    assert pool.lookup([1, 2, 3, 4, count, 7, 9, 9], 8).num_tokens == 4
    assert len(compared) <= 8


def test_a_prompt_is_hashed_once_however_often_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(33, 4)
    fill(pool, list(range(40)))
    hashed = []
    whole = page_pool.chain_hash
    monkeypatch.setattr(page_pool, "chain_hash", lambda *a: hashed.append(a) or whole(*a))
    digests = Chain()
    tokens = [*range(38), 99, 99, 99]
    hits = [pool.lookup(tokens, limit, digests) for limit in (41, 41, 22, 41)]
    assert [hit.num_tokens for hit in hits] == [38, 38, 22, 38]
    assert len(hashed) == 10
    # With more pages cached meanwhile, a later lookup finds more.
    fill(pool, tokens)
    assert pool.lookup(tokens, 41, digests).num_tokens == 40
    assert len(hashed) == 10 + 10  # those of `fill`


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12), st.integers(0, 1), st.data())
def test_a_lookup_finds_the_longest_prefix_there_is(prompts: list[list[int]], reach: int, data: st.DataObject) -> None:
    pool = PagePool(64, 3, reach)
    entered: list[list[int]] = []
    for prompt in prompts:
        pages = fill(pool, prompt)
        if data.draw(st.booleans()):
            pool.release(pages)
        whole = (len(prompt) - reach) // 3
        entered.append(prompt[: 3 * whole + reach] if whole else [])
    asked = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    # An entry depends on up to `reach` later tokens, and only whole pages are cached.
    shared = [page_pool._common_prefix(asked, prompt) - reach for prompt in entered]
    limit = max(0, len(asked) - reach)
    assert pool.lookup(asked, limit).num_tokens == max(0, *shared, 0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=60), st.integers(0, 1))
def test_every_page_is_in_exactly_one_state(operations: list[tuple[int, int]], reach: int) -> None:
    pool = PagePool(12, 2, reach)
    held: list[list[int]] = []
    quarantined: list[list[int]] = []
    for operation, value in operations:
        if operation == 0 and value <= pool.num_available:
            held.append(pool.allocate(value))
        elif operation == 1 and held:
            pool.release(held.pop(value % len(held)))
        elif operation == 2 and held:
            pages = held.pop(value % len(held))
            alone = [p for p in pages if not any(p in other for other in held)]
            pool.release(pages, quarantine=True)
            quarantined.append(alone)
        elif operation == 3 and quarantined:
            pool.leave_quarantine(quarantined.pop())
        elif operation == 4:
            tokens = [value % 3] * 8
            hit = pool.lookup(tokens, 6)
            pool.share(hit.pages)
            held.append(hit.pages)
            if held[0]:
                pool.cache(tokens, held[0], Chain(), 2 * len(held[0]))
        referenced = {p for pages in held for p in pages}
        assert pool.num_referenced == len(referenced)
        total = pool.num_referenced + pool.num_quarantined + pool.num_available
        assert total == pool.num_pages - 1
