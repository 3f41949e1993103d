"""Slots of states: what a step wrote is the request's where the step's outcome says so, and nobody else's, ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kv.cache import BlockTables, KVCache
from baton.kv.interval import Interval, Rules
from baton.kv.spec import GroupSpec, PlaneSpec, kv_planes

NUM_DRAFTS = 2
PARTS = (PlaneSpec("conv", "bfloat16", 3, 2, "channels"), PlaneSpec("ssm", "float32", 2, 5))
GROUPS = [
    GroupSpec(name="kv", owner="target", kind="full", planes=kv_planes(1, 1, "uint8"), page_size=3, layer_ids=(0,)),
    GroupSpec(name="state", owner="target", kind="state", planes=PARTS, page_size=1, layer_ids=(1,)),
]


class Sequence:
    """A request: its tokens, and how many of them its state has seen."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.computed, self.tables = tokens, 0, BlockTables()


class Life(RuleBasedStateMachine):
    """Requests that start, go on in chunks and verifications, are preempted, handed over and end, over slots that hold
    the tokens that went into them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(GROUPS, {"kv": 40, "state": 13}, NUM_DRAFTS, lambda *_: None)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.quarantined: list[BlockTables] = []
        self.num = 0

    def step(self, one: Sequence, num_rows: int, num_accepted: int) -> None:
        """Write the states behind `num_rows` rows; those of rows behind the accepted ones saw rejected drafts."""
        state, scratch = one.tables.slots("state")
        before = self.slots[state] if one.computed else ()
        for row in range(num_rows):
            right = row <= num_accepted
            self.slots[scratch[row]] = (*before, *one.tokens[one.computed : one.computed + row + 1]) if right else (-1,)
        self.cache.accept(one.tables, num_accepted)
        one.computed += num_accepted + 1

    @rule(length=st.integers(2, 9), same=st.booleans())
    def start(self, length: int, same: bool) -> None:
        self.num += 1
        one = Sequence([0 if same else self.num] * length)
        hit = self.cache.attach(one.tables, one.tokens, length, length)
        if hit is None:
            self.waiting.append(one)
            return
        assert hit == 0, "no prefix is anything without its state"
        self.running.append(one)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        one = self.waiting[0]
        if self.cache.attach(one.tables, one.tokens, len(one.tokens), len(one.tokens)) is not None:
            self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        left = len(one.tokens) - one.computed
        if left < 1:
            return
        # A chunk keeps the state behind its last row alone.
        num = data.draw(st.integers(1, left))
        state, scratch = one.tables.slots("state")
        before = self.slots[state] if one.computed else ()
        self.slots[scratch[0]] = (*before, *one.tokens[one.computed : one.computed + num])
        self.cache.accept(one.tables, 0)
        one.computed += num
        self.cache.advance(one.tables, one.tokens, one.computed, one.computed)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        if one.computed < len(one.tokens) - 1:
            return
        accepted = data.draw(st.integers(0, NUM_DRAFTS))
        more = [self.num + 100 + i for i in range(accepted + 1)]
        if not self.cache.reserve(one.tables, len(one.tokens) + len(more)):
            return
        one.tokens += more
        self.step(one, NUM_DRAFTS + 1, min(accepted, len(one.tokens) - one.computed - 1))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.release(one.tables)
        one.computed = 0
        self.waiting.insert(0, one)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A handoff failed: only the slot that a peer was shown waits."""
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before = self.cache.pools["state"].num_quarantined
        held = self.cache.quarantine(one.tables, {"kv": Interval(0, len(one.tokens)), "state": Interval(0, 1)})
        assert self.cache.pools["state"].num_quarantined == before + 1
        self.quarantined.append(held)

    @precondition(lambda self: self.quarantined)
    @rule()
    def quiet(self) -> None:
        self.cache.leave_quarantine(self.quarantined.pop(), [0] * 50, {"state": 1})

    @invariant()
    def states_are_of_what_was_computed(self) -> None:
        taken: list[int] = []
        for one in self.running:
            state, scratch = one.tables.slots("state")
            taken += [state, *scratch]
            assert len(scratch) == NUM_DRAFTS + 1
            assert self.cache.offered(one.tables, len(one.tokens))["state"] == [state]
            if one.computed:
                assert self.slots[state] == tuple(one.tokens[: one.computed])
        pool = self.cache.pools["state"]
        assert len(set(taken)) == len(taken) == pool.num_referenced
        assert 0 not in taken
        assert pool.num_cached == 0
        assert pool.num_available == pool.num_pages - 1 - len(taken) - pool.num_quarantined


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase


@given(st.integers(0, 8))
def test_a_request_needs_a_slot_and_one_for_each_row_of_a_verification(num_drafts: int) -> None:
    assert Rules("state").num_scratch(num_drafts) == num_drafts + 1
    assert Rules("full").num_scratch(num_drafts) == Rules("sliding_window", window=4).num_scratch(num_drafts) == 0
    for num_slots in range(2, num_drafts + 5):
        cache = KVCache(GROUPS, {"kv": 40, "state": num_slots}, num_drafts, lambda *_: None)
        assert cache.fits(4) is (num_slots > num_drafts + 2)
        tables = BlockTables()
        assert (cache.attach_destination(tables, [1, 2, 3, 4], 4) is None) is (num_slots <= num_drafts + 2)
        assert cache.pools["state"].num_referenced == (0 if num_slots <= num_drafts + 2 else num_drafts + 2)


def test_a_peer_is_shown_no_page_that_slides_out_while_it_might_ask() -> None:
    window = GroupSpec(
        name="w",
        owner="target",
        kind="sliding_window",
        planes=kv_planes(1, 1, "uint8"),
        page_size=3,
        layer_ids=(0,),
        window=5,
    )
    cache = KVCache([window], {"w": 20}, NUM_DRAFTS, lambda *_: None)
    for length in range(1, 30):
        tables, tokens = BlockTables(), [length] * length
        assert cache.attach(tables, tokens, length, length) == 0
        first = Rules("sliding_window", window=5).wanted(length, 0).start
        shown = cache.offered(tables, length)["w"]
        assert [page == 0 for page in shown] == [3 * (i + 1) <= first for i in range(len(shown))]
        for computed in range(length):
            cache.slide(tables, computed, computed)
            assert cache.offered(tables, length)["w"] == shown
            held = [page for page in tables.pages["w"] if page]
            assert len(held) == len(shown) - max(0, computed - 4) // 3
        cache.release(tables)
        assert cache.pools["w"].num_referenced == 0


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_the_state_before_a_step_is_there_until_its_outcome_is_known(num_accepted: int) -> None:
    """Rows that fail are run again from where they began."""
    cache, tables = KVCache(GROUPS, {"kv": 40, "state": 9}, NUM_DRAFTS, lambda *_: None), BlockTables()
    assert cache.attach(tables, [1, 2, 3], 3, 3) == 0
    state, scratch = tables.slots("state")
    before = [state, *scratch]
    chosen = scratch[num_accepted]
    assert state not in scratch
    cache.accept(tables, num_accepted)
    assert tables.slots("state")[0] == tables.tables["state"][0] == chosen
    assert state in tables.slots("state")[1]
    assert sorted([tables.slots("state")[0], *tables.slots("state")[1]]) == sorted(before)
