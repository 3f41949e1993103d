"""The KV cache: groups with different page sizes, agreeing hits, and exclusive pages for writes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kv import page_pool
from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.interval import Interval, Kind
from baton.kv.spec import GroupSpec, kv_planes

SIZES = {"target": 4, "window": 3, "draft": 6}
WINDOW = 5
LOOKAHEAD = 2


def group(
    name: str, page_size: int, module: int | None = 0, window: int | None = None, kind: Kind = "full"
) -> GroupSpec:
    return GroupSpec(
        name=name,
        owner="target" if module == 0 else "draft",
        kind=kind if window is None else "sliding_window",
        planes=kv_planes(1, 1, "uint8"),
        page_size=page_size,
        window=window,
        layer_ids=(0,),
        module=module,
    )


class Memory:
    """A cache over cells: each holds the tokens that its entry depends on."""

    def __init__(self, num_pages: int = 20, sizes: dict[str, int] = SIZES, module: int | None = 1) -> None:
        groups = [
            group("target", sizes["target"]),
            group("window", sizes["window"], window=WINDOW),
            group("draft", sizes["draft"], module),
        ]
        self.cells: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.copied: list[tuple[str, int, int]] = []
        self.cache = KVCache(groups, {g.name: num_pages + i for i, g in enumerate(groups)}, LOOKAHEAD, self.copy_page)

    def copy_page(self, name: str, source: int, destination: int) -> None:
        self.copied.append((name, source, destination))
        for offset in range(self.cache.pools[name].page_size):
            self.cells[name, destination, offset] = self.cells.get((name, source, offset), ())

    def truth(self, name: str, tokens: list[int], entry: int) -> tuple[int, ...]:
        return tuple(tokens[: entry + 1 + self.cache.rules[name].reach])

    def compute(self, tables: BlockTables, tokens: list[int], start: int, stop: int) -> None:
        """Write entries [start, stop); the drafter's are right as far as its tokens are known."""
        for name, pool in self.cache.pools.items():
            for entry in range(start, stop):
                page = tables.pages[name][entry // pool.page_size]
                assert page, "a step writes into the null page"
                assert pool._refs[page] == 1, "a step writes into a page that others hold"
                assert page not in pool._cached, "a step writes into a page of the prefix cache"
                self.cells[name, page, entry % pool.page_size] = self.truth(name, tokens, entry)

    def check(self, tables: BlockTables, tokens: list[int], num: int) -> None:
        """Every entry below `num` that a later query reads is right."""
        for name, pool in self.cache.pools.items():
            for entry in range(self.cache.rules[name].first_needed(num), num):
                page = tables.pages[name][entry // pool.page_size]
                assert self.cells[name, page, entry % pool.page_size] == self.truth(name, tokens, entry), (name, entry)

    def run(self, tokens: list[int]) -> BlockTables:
        """Run a request that computes all its tokens but the last, and ends."""
        tables, num = BlockTables(), len(tokens) - 1
        hit = self.cache.attach(tables, tokens, num, num)
        assert hit is not None
        self.check(tables, tokens, hit)
        self.compute(tables, tokens, hit, num)
        self.cache.advance(tables, tokens, num, num)
        self.cache.release(tables)
        return tables


def test_every_group_is_trimmed_to_the_common_hit() -> None:
    memory = Memory()
    tokens = list(range(30))
    memory.run(tokens)
    # Another prompt shares 13 tokens: whole pages of 4, 3 and 6, and parts of the next ones.
    other, tables = [*tokens[:13], *range(100, 110)], BlockTables()
    assert {n: p.lookup(other, 22).num_tokens for n, p in memory.cache.pools.items()} == {
        "target": 13,
        "window": 13,
        "draft": 12,
    }
    assert memory.cache.attach(tables, other, 22, 22) == 12
    # The common hit is at a page boundary of every group: nothing is shared beyond it, and nothing copied.
    assert memory.copied == []
    memory.compute(tables, other, 12, 22)
    memory.check(tables, other, 22)
    assert memory.cache.attach(BlockTables(), tokens, 12, 12) == 11
    assert {name for name, _, _ in memory.copied} == set(SIZES), "a page that is hit in part is copied"


def test_a_hit_in_part_leaves_the_shared_page_as_it_is() -> None:
    memory = Memory()
    tokens = list(range(30))
    memory.run(tokens)
    tables, other = BlockTables(), [*tokens[:9], *range(50, 70)]
    assert memory.cache.attach(tables, other, 20, 20) == 8
    memory.compute(tables, other, 8, 20)
    again = BlockTables()
    # The drafter's last whole page ends at 24.
    assert memory.cache.attach(again, tokens, 29, 29) == 24
    memory.check(again, tokens, 24)
    memory.check(tables, other, 20)


def test_without_a_page_for_a_copy_only_whole_pages_are_hit() -> None:
    sizes = {"target": 4, "window": 2, "draft": 4}
    memory = Memory(num_pages=4, sizes=sizes)
    memory.cache.num_lookahead_slots = 0
    memory.cache.pools["window"] = page_pool.PagePool(8, 2)
    tokens = list(range(13))
    memory.run(tokens[:12])
    tables = BlockTables()
    # There are three pages, and three are needed: the source of a copy must be evicted.
    assert memory.cache.attach(tables, [*tokens[:6], 50, 51, 52, 53, 54, 55], 12, 12) == 4
    assert memory.copied == []


def test_no_room_changes_nothing() -> None:
    memory = Memory(num_pages=8)
    tokens = list(range(40))
    memory.run(tokens[:14])
    first = BlockTables()
    assert memory.cache.attach(first, [99] * 10, 10, 10) == 0
    before = {n: (p.num_available, p.num_referenced, p.version) for n, p in memory.cache.pools.items()}
    tables = BlockTables()
    assert memory.cache.attach(tables, tokens, 39, 39) is None
    assert memory.cache.attach_destination(tables, tokens, 39) is None
    assert not memory.cache.reserve(first, 40)
    assert not tables.pages
    assert before == {n: (p.num_available, p.num_referenced, p.version) for n, p in memory.cache.pools.items()}
    assert memory.copied == []
    # The window's eight pages of 3 are the fewest, minus the slots for drafts.
    assert [memory.cache.fits(n) for n in (22, 23)] == [True, False]


def test_waiting_looks_nothing_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(num_pages=10)
    tokens = list(range(40))
    memory.run(tokens[:20])
    blocker, waiting = BlockTables(), BlockTables()
    assert memory.cache.attach(blocker, [99] * 12, 12, 12) == 0
    hashed: list[object] = []
    looked: list[object] = []
    whole, lookup = page_pool.chain_hash, page_pool.PagePool.lookup
    monkeypatch.setattr(page_pool, "chain_hash", lambda *a: hashed.append(a) or whole(*a))
    monkeypatch.setattr(page_pool.PagePool, "lookup", lambda *a: looked.append(a) or lookup(*a))
    assert [memory.cache.attach(waiting, tokens, 24, 24) for _ in range(5)] == [None] * 5
    assert len(looked) == len(SIZES)
    memory.cache.release(blocker)
    hit = memory.cache.attach(waiting, tokens, 24, 24)
    assert hit is not None
    # Digests from the lookup are reused when the pages are cached.
    memory.compute(waiting, tokens, hit, 24)
    memory.cache.advance(waiting, tokens, 24, 24)
    assert len(hashed) == sum(24 // size for size in SIZES.values())
    memory.cache.release(waiting)
    assert memory.cache.attach(waiting, tokens, 24, 24) is not None
    assert len(hashed) == sum(24 // size for size in SIZES.values())


def test_a_destination_has_its_own_hit_in_every_group() -> None:
    memory = Memory()
    tokens = list(range(30))
    memory.run(tokens)
    tables = BlockTables()
    # 24 tokens are whole pages everywhere; the drafter's last entry always moves.
    found = memory.cache.attach_destination(tables, tokens, 24)
    assert found is not None
    assert found.hits == {"target": 24, "window": 24, "draft": 23}
    assert found.wanted == {"target": Interval(24, 24), "window": Interval(24, 24), "draft": Interval(23, 24)}
    assert [name for name, _, _ in memory.copied] == ["draft"]


def test_a_drafter_that_sees_tokens_alone_is_hit_as_the_target_is() -> None:
    memory = Memory(module=None)
    tokens = list(range(30))
    memory.run(tokens)
    found = memory.cache.attach_destination(BlockTables(), tokens, 24)
    assert found is not None
    assert found.hits["draft"] == 24
    assert found.wanted["draft"] == Interval(24, 24)


def test_pages_before_a_window_are_null() -> None:
    memory = Memory()
    tokens, tables = list(range(30)), BlockTables()
    found = memory.cache.attach_destination(tables, tokens, 20)
    assert found is not None
    assert found.wanted["window"] == Interval(16, 20)
    assert tables.pages["window"][:5] == [0] * 5
    assert 0 not in tables.pages["window"][5:]
    assert list(tables.tables["window"]) == tables.pages["window"]
    memory.cache.advance(tables, tokens, 20, 20)
    assert memory.cache.pools["window"].lookup(tokens, 20).num_tokens == 0, "the page in which it begins is not whole"
    assert memory.cache.pools["target"].lookup(tokens, 20).num_tokens == 20
    memory.cache.release(tables)
    assert all(pool.num_referenced == 0 for pool in memory.cache.pools.values())


def received(memory: Memory, tokens: list[int], num: int) -> BlockTables:
    """A request whose first `num` tokens come by a handoff, and which computes the others."""
    tables = BlockTables()
    found = memory.cache.attach_destination(tables, tokens[:num], num)
    assert found is not None
    for name, wanted in found.wanted.items():
        size = memory.cache.pools[name].page_size
        for entry in range(wanted.start, wanted.stop):
            page = tables.pages[name][entry // size]
            memory.cells[name, page, entry % size] = memory.truth(name, tokens, entry)
    memory.cache.advance(tables, tokens[: num + 1], num, num - 1)
    assert memory.cache.reserve(tables, len(tokens))
    for at in range(num, len(tokens) - 1):
        memory.check(tables, tokens, at)
        memory.compute(tables, tokens, at, at + 1)
        memory.cache.advance(tables, tokens, at + 1, at + 1)
        memory.cache.slide(tables, len(tokens), at + 1, at + 1)
    return tables


@pytest.mark.parametrize("num", range(12, 24))
def test_a_prefix_hit_needs_the_end_of_a_window_alone(num: int) -> None:
    """A request that came by a handoff is found again after some tokens more, at every slot of a page."""
    memory, tokens = Memory(num_pages=30), list(range(40))
    memory.cache.release(received(memory, tokens, num))
    assert memory.cache.pools["window"].lookup(tokens, 12).num_tokens == 0
    first = BlockTables()
    assert memory.cache.attach(first, tokens[:num], num, num) == 0, "the window's first page is not whole"
    memory.cache.release(first)
    starts = set()
    for length in range(num + 10, 40):
        tables = BlockTables()
        start = memory.cache.attach(tables, tokens[:length], length, length)
        assert start is not None
        starts.add(start)
        memory.check(tables, tokens, start)
        memory.compute(tables, tokens, start, length)
        memory.cache.release(tables)
    assert min(starts) > num
    assert max(starts) == 36, "whole pages of all groups"
    assert all(pool.num_referenced == 0 for pool in memory.cache.pools.values())


def test_a_hit_is_cut_to_where_its_window_is_whole() -> None:
    memory, tokens = Memory(num_pages=30), list(range(40))
    memory.cache.release(received(memory, tokens, 20))
    window = memory.cache.pools["window"]
    hits = {most: window.lookup(tokens, most) for most in range(18, 40)}
    assert {most for most, hit in hits.items() if not hit.num_tokens} == set(range(18, 22))
    for most, hit in hits.items():
        if most >= 22:
            assert (hit.num_tokens, hit.least) == (most, 3 * hit.pages.count(0) + WINDOW - 1)
            assert hit.least <= most
    spared = window.lookup(tokens, 39, None, 100)
    assert (spared.pages.count(0), spared.least) == (6, 22), "as many as there are"
    memory.cache.pools["draft"].forget(memory.cache.pools["draft"].lookup(tokens, 39).pages[4:])
    assert memory.cache.attach(BlockTables(), tokens, 39, 39) == 24, "the drafter has no more, and the window has 24"
    memory.cache.pools["draft"].forget(memory.cache.pools["draft"].lookup(tokens, 39).pages[3:])
    assert memory.cache.attach(BlockTables(), tokens, 39, 39) == 0, "nor a window at 18"


def test_a_window_that_slides_gives_its_pages_back() -> None:
    memory = Memory()
    tokens, tables = list(range(60)), BlockTables()
    assert memory.cache.attach(tables, tokens, 20, 20) == 0
    memory.compute(tables, tokens, 0, 20)
    for num in range(20, 40):
        memory.cache.advance(tables, tokens, num, num)
        memory.cache.slide(tables, num + 1, num, num)
        memory.check(tables, tokens, num)
        assert memory.cache.pools["window"].num_referenced <= 2 + -(-(WINDOW + LOOKAHEAD) // SIZES["window"])
        assert memory.cache.reserve(tables, num + 1)
        memory.compute(tables, tokens, num, num + 1)
    assert memory.cache.pools["target"].num_referenced == -(-(40 + LOOKAHEAD) // 4)
    memory.cache.release(tables)
    assert all(pool.num_referenced == 0 for pool in memory.cache.pools.values())


def test_a_drafters_window_slides_by_its_own_entries() -> None:
    """Its pages begin with entry 6, and its last entry waits for a token; the target's pages begin with entry 0."""
    groups = [group("target", 1), group("window", 1, window=WINDOW), group("draft", 1, 1, WINDOW)]
    cache = KVCache(groups, {one.name: 40 for one in groups}, LOOKAHEAD, lambda *_: None)
    tables = BlockTables()
    cache.attach(tables, list(range(20)), 20, 20)
    cache.slide(tables, 20, 20, 20, 6)
    assert {name: pages.count(0) for name, pages in tables.pages.items()} == {
        "target": 0,
        "window": 20 - WINDOW + 1,
        "draft": 19 - 6 - WINDOW + 1,
    }


def test_a_state_needs_one_slot_and_is_no_prefix() -> None:
    groups = [group("target", 4), group("state", 1, kind="state")]
    cache = KVCache(groups, {"target": 20, "state": 3}, 0, lambda *_: None)
    tables, tokens = BlockTables(), list(range(20))
    assert cache.attach(tables, tokens, 16, 16) == 0
    assert len(tables.pages["state"]) == 1
    assert cache.reserve(tables, 20)
    assert len(tables.pages["state"]) == 1
    cache.advance(tables, tokens, 20, 20)
    cache.release(tables)
    # The target's prefix is cached, but the state is not: no request can start after it.
    assert cache.pools["target"].lookup(tokens, 16).num_tokens == 16
    assert cache.attach(tables, tokens, 16, 16) == 0


def test_quarantined_pages_come_back_with_what_is_proven() -> None:
    memory = Memory()
    tokens, tables = list(range(30)), BlockTables()
    memory.run(tokens[:9])
    found = memory.cache.attach_destination(tables, tokens, 25)
    assert found is not None
    pages = {name: list(ids) for name, ids in tables.pages.items()}
    held = memory.cache.quarantine(tables, found.wanted)
    assert not tables.pages
    # The peer never wrote pages before the first wanted entry.
    assert pages["target"][:2] == memory.cache.pools["target"].lookup(tokens, 8).pages
    assert held.pages["target"] == [0, 0, *pages["target"][2:]]
    assert memory.cache.pools["target"].num_quarantined == len(pages["target"]) - 2
    memory.cache.leave_quarantine(held, tokens, {"target": 21, "window": 21, "draft": 13})
    assert all(pool.num_quarantined == pool.num_referenced == 0 for pool in memory.cache.pools.values())
    found_again = {name: pool.lookup(tokens, 25).num_tokens for name, pool in memory.cache.pools.items()}
    # A window is no prefix if one of its entries is not proven.
    assert found_again == {"target": 20, "window": 6, "draft": 12}


def test_a_window_that_begins_within_a_page_is_no_prefix_whatever_is_proven() -> None:
    """The earlier entries of that page never arrived: another prompt with the same beginning must not get them."""
    memory, tokens = Memory(), list(range(30))
    size = memory.cache.pools["window"].page_size
    for n in range(1, 30):
        tables = BlockTables()
        found = memory.cache.attach_destination(tables, tokens, n)
        assert found is not None
        inside = 0 < found.wanted["window"].start < size
        held = memory.cache.quarantine(tables, found.wanted)
        memory.cache.leave_quarantine(held, tokens, {"window": n} if inside else {})
        if inside:
            break
    assert inside
    assert memory.cache.pools["window"].lookup(tokens, n).num_tokens == 0


def test_spare_pages_are_all_or_none() -> None:
    memory = Memory(num_pages=3)
    taken = memory.cache.pools["draft"].allocate(4)
    assert memory.cache.spare() is None
    assert memory.cache.pools["target"].num_referenced == 0
    memory.cache.pools["draft"].release(taken)
    tables = memory.cache.spare()
    assert tables is not None
    assert {name: len(pages) for name, pages in tables.pages.items()} == dict.fromkeys(SIZES, 1)


class Requests(RuleBasedStateMachine):
    """Requests that arrive, compute, slide, are preempted, received, quarantined and end, over a few pages."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(num_pages=12)
        self.open: list[tuple[BlockTables, list[int], int]] = []
        self.held: list[tuple[BlockTables, list[int]]] = []

    @rule(stem=st.integers(0, 1), shared=st.integers(0, 14), rest=st.integers(1, 8), rows=st.integers(1, 20))
    def come(self, stem: int, shared: int, rest: int, rows: int) -> None:
        tokens = [*([stem] * shared), *range(10, 10 + rest), 7]
        tables, num = BlockTables(), len(tokens) - 1
        hit = self.memory.cache.attach(tables, tokens, num, rows)
        if hit is None:
            return
        assert 0 <= hit < num
        self.memory.check(tables, tokens, hit)
        stop = min(num, hit + rows)
        self.memory.compute(tables, tokens, hit, stop)
        self.memory.cache.advance(tables, tokens, stop, stop)
        self.open.append((tables, tokens, stop))

    @rule(stem=st.integers(0, 1), shared=st.integers(0, 14), rest=st.integers(1, 8))
    def receive(self, stem: int, shared: int, rest: int) -> None:
        tokens = [*([stem] * shared), *range(10, 10 + rest), 7]
        tables, num = BlockTables(), len(tokens) - 1
        found = self.memory.cache.attach_destination(tables, tokens, num)
        if found is None:
            return
        for name, wanted in found.wanted.items():
            pool = self.memory.cache.pools[name]
            for entry in range(wanted.start, wanted.stop):
                page = tables.pages[name][entry // pool.page_size]
                assert page
                assert pool._refs[page] == 1
                assert page not in pool._cached
                self.memory.cells[name, page, entry % pool.page_size] = self.memory.truth(name, tokens, entry)
        if stem:
            self.held.append((self.memory.cache.quarantine(tables, found.wanted), tokens))
            return
        self.memory.check(tables, tokens, num)
        self.memory.cache.advance(tables, tokens, num, num)
        self.open.append((tables, tokens, num))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), count=st.integers(1, 5))
    def compute(self, which: int, count: int) -> None:
        index = which % len(self.open)
        tables, tokens, num = self.open[index]
        tokens += [20] * max(0, num + count + 1 - len(tokens))
        if self.memory.cache.reserve(tables, num + count):
            self.memory.compute(tables, tokens, num, num + count)
            self.memory.cache.advance(tables, tokens, num + count, num + count)
            self.memory.cache.slide(tables, len(tokens), num + count, num + count)
            self.open[index] = tables, tokens, num + count

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), again=st.booleans())
    def end(self, which: int, again: bool) -> None:
        tables, tokens, num = self.open.pop(which % len(self.open))
        self.memory.cache.release(tables)
        if again:
            hit = self.memory.cache.attach(tables, tokens, num, num)
            if hit is not None:
                self.memory.compute(tables, tokens, hit, num)
                self.memory.cache.advance(tables, tokens, num, num)
                self.open.append((tables, tokens, num))

    @precondition(lambda self: self.held)
    @rule(proven=st.integers(0, 10))
    def become_quiet(self, proven: int) -> None:
        held, tokens = self.held.pop()
        stop = min(proven, len(tokens) - 1)
        self.memory.cache.leave_quarantine(held, tokens, dict.fromkeys(SIZES, stop))

    @invariant()
    def every_request_reads_what_it_wrote(self) -> None:
        for tables, tokens, num in self.open:
            self.memory.check(tables, tokens, num)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        for name, pool in self.memory.cache.pools.items():
            held = {page for tables, _, _ in self.open for page in tables.pages[name] if page}
            assert pool.num_referenced == len(held)
            assert pool.num_referenced + pool.num_quarantined + pool.num_available == pool.num_pages - 1


Requests.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRequests = Requests.TestCase


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=24),
    st.lists(st.integers(0, 1), min_size=2, max_size=24),
    st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
    st.sampled_from([1, 3, None]),
)
def test_a_hit_is_what_the_other_prompt_shares(
    first: list[int], second: list[int], sizes: tuple[int, int, int], module: int | None
) -> None:
    memory = Memory(60, dict(zip(SIZES, sizes, strict=True)), module)
    memory.run(first)
    tables, num = BlockTables(), len(second) - 1
    hit = memory.cache.attach(tables, second, num, num)
    assert hit is not None
    memory.check(tables, second, hit)
    memory.compute(tables, second, hit, num)
    memory.check(tables, second, num)
