"""State slots: a step's writes count for the request as its outcome says, and never for another one. A checkpoint for
other prompts has seen exactly the tokens that they share.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kv.block_tables import BlockTables
from baton.kv.cache import OWNERS, KVCache
from baton.kv.interval import Interval, Rules
from baton.kv.prefix import Chain
from baton.kv.spec import GroupSpec, PlaneSpec, kv_planes
from baton.kv.state_pool import StatePool

NUM_DRAFTS = 2
INTERVAL = 3
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
    """Requests that start, continue in chunks and verifications, are preempted, handed over and end, over slots that
    hold the tokens that went into them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(GROUPS, {"kv": 40, "state": 13}, NUM_DRAFTS, self.copy, checkpoint_tokens=INTERVAL)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.quarantined: list[BlockTables] = []
        self.num = 0

    def copy(self, group: str, source: int, destination: int) -> None:
        if group == "state":
            self.slots[destination] = self.slots[source]

    def attach(self, one: Sequence) -> bool:
        hit = self.cache.attach(one.tables, one.tokens, len(one.tokens), len(one.tokens))
        if hit is None:
            return False
        assert hit % INTERVAL == 0
        one.computed = hit
        self.running.append(one)
        return True

    def step(self, one: Sequence, num_rows: int, num_accepted: int) -> None:
        """Write the states after `num_rows` rows; those after the accepted rows have seen rejected drafts."""
        state, scratch = one.tables.slots("state")
        before = self.slots[state] if one.computed else ()
        for row in range(num_rows):
            right = row <= num_accepted
            self.slots[scratch[row]] = (*before, *one.tokens[one.computed : one.computed + row + 1]) if right else (-1,)
        one.computed += num_accepted + 1
        self.cache.accept(one.tables, num_accepted, one.computed)
        self.cache.advance(one.tables, one.tokens, one.computed, one.computed)

    @rule(length=st.integers(2, 14), same=st.integers(0, 14))
    def start(self, length: int, same: int) -> None:
        self.num += 1
        one = Sequence([0] * min(same, length) + [self.num] * max(0, length - same))
        if not self.attach(one):
            self.waiting.append(one)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        if self.attach(self.waiting[0]):
            self.waiting.pop(0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        left = len(one.tokens) - one.computed
        if left < 1:
            return
        # A chunk keeps the state after its last row, and the checkpoints that are due on the way.
        num = data.draw(st.integers(1, left))
        state, scratch = one.tables.slots("state")
        before = self.slots[state] if one.computed else ()
        self.cache.plan_checkpoints(one.tables, one.tokens, one.computed, one.computed + num)
        for count, slot in one.tables.checkpoints["state"].items():
            assert one.computed < count < one.computed + num
            self.slots[slot] = (*before, *one.tokens[one.computed : count])
        self.slots[scratch[0]] = (*before, *one.tokens[one.computed : one.computed + num])
        one.computed += num
        self.cache.accept(one.tables, 0, one.computed)
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
        """A handoff failed: only the slot that a peer could write goes into quarantine."""
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
        assert pool.num_available == pool.num_pages - 1 - len(taken) - pool.num_quarantined


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase


HYBRID_DRAFTER = GroupSpec(
    name="draft", owner="draft", kind="state", planes=PARTS, page_size=1, layer_ids=(0,), module=None
)


def test_the_drafters_states_go_their_own_way() -> None:
    """Rows of target and drafter differ: each has its own state, scratch slots and checkpoints."""
    copied: list[tuple[str, int, int]] = []
    cache = KVCache(
        [*GROUPS, HYBRID_DRAFTER],
        {"kv": 40, "state": 20, "draft": 20},
        8,
        lambda *which: copied.append(which),
        checkpoint_tokens=INTERVAL,
    )
    tables, tokens = BlockTables(), list(range(12))
    assert cache.attach(tables, tokens, 12, 12) == 0
    (state, scratch), (own, ahead) = tables.slots("state"), tables.slots("draft")
    assert (len(scratch), len(ahead)) == (9, 3)
    assert cache.offered(tables, 12)["draft"] == [own]
    cache.plan_checkpoints(tables, tokens, 0, 7, "draft")
    assert (list(tables.checkpoints["draft"]), list(tables.checkpoints["state"])) == ([3, 6], [])
    # After seven rows no checkpoint is due; after two more one is.
    after = ahead[0]
    cache.accept(tables, 0, 7, "draft")
    assert (tables.slots("draft")[0], tables.slots("state")[0], copied) == (after, state, [])
    cache.advance(tables, tokens, 7, 7)
    cache.plan_checkpoints(tables, tokens, 7, 9, "draft")
    cache.accept(tables, 0, 9, "draft")
    kept = tables.checkpoints["draft"][9]
    assert (tables.slots("draft")[0], copied) == (own, [("draft", own, kept)])
    cache.advance(tables, tokens, 9, 9)
    cache.release(tables)
    assert [pool.num_referenced for pool in cache.pools.values()] == [0, 0, 0]
    assert cache.pools["draft"].lookup(tokens, 12).num_tokens == 9
    # The target's state has no checkpoint: both begin with nothing.
    assert cache.attach(BlockTables(), tokens, 12, 12) == 0


def test_a_drafter_that_starts_cold_begins_at_a_state_with_all_its_layers() -> None:
    small = GroupSpec(
        name="draft.1",
        owner="draft",
        kind="full",
        planes=kv_planes(1, 1, "uint8"),
        page_size=3,
        layer_ids=(1,),
        module=None,
    )
    cache = KVCache(
        [*GROUPS, HYBRID_DRAFTER, small],
        {"kv": 40, "state": 20, "draft": 20, "draft.1": 40},
        2,
        lambda *_: None,
        checkpoint_tokens=6,
    )
    tables, tokens = BlockTables(), list(range(12))
    assert cache.attach(tables, tokens, 12, 12) == 0
    for owner in OWNERS:
        cache.plan_checkpoints(tables, tokens, 0, 11, owner)
        cache.accept(tables, 0, 11, owner)
    cache.advance(tables, tokens, 11, 11)
    cache.release(tables)
    found = cache.attach_destination(BlockTables(), tokens, 12, {"kv", "state"})
    assert found is not None
    assert found.hits == {"kv": 9, "state": 0, "draft": 9, "draft.1": 9}
    assert found.wanted.keys() == {"kv", "state"}


@given(st.integers(1, 8))
def test_a_drafter_needs_one_slot_after_its_rows_and_two_in_turn(num_drafts: int) -> None:
    assert Rules("state", None).num_scratch(num_drafts) == min(num_drafts, 3)
    assert Rules("state", None).num_scratch(0) == 1


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
            cache.slide(tables, length, computed, computed)
            assert cache.offered(tables, length)["w"] == shown
            held = [page for page in tables.pages["w"] if page]
            assert len(held) == len(shown) - max(0, computed - 4) // 3
        cache.release(tables)
        assert cache.pools["w"].num_referenced == 0


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_the_state_before_a_step_is_there_until_its_outcome_is_known(num_accepted: int) -> None:
    """Failed rows are run again from where they began."""
    cache, tables = KVCache(GROUPS, {"kv": 40, "state": 9}, NUM_DRAFTS, lambda *_: None), BlockTables()
    assert cache.attach(tables, [1, 2, 3], 3, 3) == 0
    state, scratch = tables.slots("state")
    before = [state, *scratch]
    chosen = scratch[num_accepted]
    assert state not in scratch
    cache.accept(tables, num_accepted, 3)
    assert tables.slots("state")[0] == tables.tables["state"][0] == chosen
    assert state in tables.slots("state")[1]
    assert sorted([tables.slots("state")[0], *tables.slots("state")[1]]) == sorted(before)


class Kept:
    """A cache whose slots hold how many tokens their state has seen."""

    def __init__(self, num_slots: int = 20, interval: int = 4, **settings: Any) -> None:
        self.seen: dict[int, int] = {}
        self.cache = KVCache(
            GROUPS, {"kv": 100, "state": num_slots}, NUM_DRAFTS, self.copy, checkpoint_tokens=interval, **settings
        )

    def copy(self, group: str, source: int, destination: int) -> None:
        if group == "state":
            self.seen[destination] = self.seen[source]

    def prefill(self, tokens: list[int], chunk: int = 1000) -> tuple[BlockTables, int | None]:
        """Compute all tokens of a prompt but the hit. Returns the hit as well."""
        tables = BlockTables()
        hit = self.cache.attach(tables, tokens, len(tokens), len(tokens))
        for start in range(hit or 0, len(tokens), chunk):
            stop = min(start + chunk, len(tokens))
            self.cache.plan_checkpoints(tables, tokens, start, stop)
            self.seen |= {slot: count for count, slot in tables.checkpoints["state"].items()}
            self.seen[tables.slots("state")[1][0]] = stop
            self.cache.accept(tables, 0, stop)
            self.cache.advance(tables, tokens, stop, stop)
        return tables, hit


@pytest.mark.parametrize("chunk", [1, 5, 6, 7, 1000])
def test_a_prompt_starts_at_the_last_checkpoint_that_it_shares(chunk: int) -> None:
    """At multiples of whole pages of all groups, with any chunks, and at the last whole pages."""
    kept, tokens = Kept(), list(range(40))
    assert (kept.cache.checkpoint_interval, kept.cache.whole_pages) == (6, 3)
    tables, hit = kept.prefill(tokens, chunk)
    assert hit == 0
    kept.cache.release(tables)
    for length in range(1, 45):
        again = (tokens + [-1] * 9)[:length]
        tables, hit = BlockTables(), kept.cache.attach(other := BlockTables(), again, length, length)
        # At least one row is computed.
        assert hit == (39 if length >= 40 else (length - 1) // 6 * 6)
        assert not hit or kept.seen[other.slots("state")[0]] == hit
        kept.cache.release(other)
    diverged = tokens[:20] + [99] * 20
    assert kept.prefill(diverged)[1] == 18


def test_no_state_is_sent_if_the_destination_has_the_one_after_the_prompt() -> None:
    kept, tokens = Kept(), list(range(24))
    kept.cache.release(kept.prefill(tokens)[0])
    for length in range(1, 25):
        tables = BlockTables()
        found = kept.cache.attach_destination(tables, tokens[:length], length)
        assert found is not None
        has = length % 6 == 0
        assert found.hits == {"kv": length, "state": length if has else 0}
        assert found.wanted["state"] == (Interval(1, 1) if has else Interval(0, 1))
        assert not has or kept.seen[tables.slots("state")[0]] == length
        kept.cache.release(tables)


def test_a_checkpoint_of_generated_tokens_is_the_state_after_its_row() -> None:
    """In a verification that accepts rows on both sides of it."""
    kept, tokens = Kept(), list(range(10))
    tables, _ = kept.prefill(tokens)
    for computed, num_accepted in ((12, 1), (13, 0), (16, 2), (19, 2)):
        for row, slot in enumerate(tables.slots("state")[1]):
            kept.seen[slot] = computed - num_accepted + row
        tokens += range(len(tokens), computed + 1)
        assert kept.cache.reserve(tables, len(tokens))
        kept.cache.accept(tables, num_accepted, computed)
        kept.cache.advance(tables, tokens, computed, computed)
    assert kept.seen[tables.slots("state")[0]] == 19
    pool = kept.cache.pools["state"]
    hits = [pool.lookup(tokens, most) for most in range(20)]
    assert [hit.num_tokens for hit in hits] == [most // 6 * 6 for most in range(20)]
    assert all(kept.seen[hit.pages[0]] == hit.num_tokens for hit in hits if hit.pages)


def test_checkpoints_make_room_for_requests_and_take_none_from_them() -> None:
    kept = Kept(num_slots=1 + 4 + 3)
    long = kept.prefill(list(range(60)))[0]
    assert kept.cache.pools["state"].num_cached == 2, "of three slots that the request does not need"
    assert kept.cache.pools["state"].lookup(list(range(60)), 60).num_tokens == 60
    kept.cache.release(long)
    first, _ = kept.prefill([100] * 5)
    second = kept.cache.attach(BlockTables(), [200] * 5, 5, 5)
    assert second is None, "seven slots are no eight"
    kept.cache.release(first)
    assert kept.prefill(list(range(60)))[1] == 54


@pytest.mark.parametrize("destination", [False, True])
def test_a_hit_needs_no_more_slots_than_none(destination: bool) -> None:
    """While a slot is in quarantine, the checkpoint itself becomes the state of its request."""
    kept, tokens = Kept(num_slots=1 + 4 + 1), list(range(36))
    kept.cache.release(kept.prefill(tokens)[0])
    pool = kept.cache.pools["state"]
    (checkpoint,) = pool.lookup(tokens, 36).pages
    other = pool.allocate(1)
    pool.release(other, quarantine=True)
    tables = BlockTables()
    if destination:
        found = kept.cache.attach_destination(tables, tokens, 36)
        assert found is not None
        assert found.hits["state"] == 36
    else:
        assert kept.cache.attach(tables, [*tokens, 7, 8], 38, 38) == 36
    assert tables.slots("state")[0] == checkpoint
    assert kept.seen[checkpoint] == 36
    assert pool.lookup(tokens, 36).num_tokens == pool.num_available == 0, "nobody else starts from it"
    assert kept.cache.attach(BlockTables(), tokens, 36, 36) is None
    kept.cache.release(tables)
    assert pool.num_available == 4
    assert kept.prefill(tokens)[1] == 0, "it has been written since"


def test_one_free_slot_is_enough_for_a_checkpoint() -> None:
    kept, tokens = Kept(num_slots=1 + 4 + 1), list(range(40))
    kept.cache.release(kept.prefill(tokens)[0])
    assert kept.cache.pools["state"].lookup(tokens, 40).num_tokens == 39


def test_a_checkpoint_outlives_those_before_it_and_others_of_the_prompt() -> None:
    kept, tokens = Kept(num_slots=1 + 4 + 1), list(range(40))
    kept.cache.release(kept.prefill(tokens, chunk=6)[0])
    pool = kept.cache.pools["state"]
    assert pool.num_cached == 1
    assert pool.lookup(tokens, 40).num_tokens == 39
    assert pool.lookup(tokens, 38).num_tokens == 0
    assert kept.prefill(tokens)[1] == 39


@pytest.mark.parametrize("num_prompt", range(7, 20))
def test_the_last_whole_pages_of_an_answer_have_the_only_checkpoint(num_prompt: int) -> None:
    """Wherever the answer begins and ends, and whatever is accepted: the earlier ones make room."""
    kept, tokens = Kept(interval=300), list(range(num_prompt))
    tables, _ = kept.prefill(tokens)
    pool = kept.cache.pools["state"]
    assert pool.lookup(tokens, num_prompt).num_tokens == num_prompt // 3 * 3
    computed = num_prompt
    for step in range(12):
        num_accepted = step % (NUM_DRAFTS + 1)
        computed += num_accepted + 1
        for row, slot in enumerate(tables.slots("state")[1]):
            kept.seen[slot] = computed - num_accepted + row
        tokens += range(len(tokens), computed + 1)
        assert kept.cache.reserve(tables, len(tokens))
        kept.cache.accept(tables, num_accepted, computed)
        kept.cache.advance(tables, tokens, computed, computed)
        hit = pool.lookup(tokens, computed)
        assert (hit.num_tokens, pool.num_cached) == (computed // 3 * 3, 1)
        assert kept.seen[hit.pages[0]] == hit.num_tokens
    kept.cache.release(tables)
    assert kept.prefill([*tokens, 7, 8, 9])[1] == computed // 3 * 3, "the next turn"


def test_without_prefix_caching_no_state_is_kept() -> None:
    kept, tokens = Kept(enable_prefix_caching=False), list(range(40))
    kept.cache.release(kept.prefill(tokens)[0])
    assert kept.cache.pools["state"].num_cached == 0
    assert kept.prefill(tokens)[1] == 0


def test_a_stored_checkpoint_names_the_one_before_it() -> None:
    pool, chain, tokens = StatePool(8, INTERVAL), Chain(), list(range(9))
    told: list[tuple[bytes, bytes | None, list[int]]] = []
    pool.on_stored = lambda own, parent, root, last: told.append((own, parent, list(last)))
    for num in (3, 6, 9):
        [slot] = pool.allocate(1)
        pool.enter(tokens, num, slot, chain)
    assert [(parent, last) for _, parent, last in told] == [
        (None, tokens[:3]),
        (told[0][0], tokens[3:6]),
        (told[1][0], tokens[6:]),
    ]


def test_an_end_without_a_slot_makes_no_room_later() -> None:
    """Other requests hold all slots when a checkpoint is due; when the next is, there is none to replace."""
    kept, tokens = Kept(num_slots=1 + 2 * (NUM_DRAFTS + 2) + 1, interval=300), list(range(8))
    tables, _ = kept.prefill(tokens)
    pool = kept.cache.pools["state"]
    held = pool.allocate(pool.num_available)
    for computed in range(9, 13, 3):
        tokens += range(len(tokens), computed + 1)
        if computed == 12:
            pool.release(held)
        assert kept.cache.reserve(tables, len(tokens))
        kept.seen[tables.slots("state")[1][0]] = computed
        kept.cache.accept(tables, 0, computed)
        kept.cache.advance(tables, tokens, computed, computed)
    assert pool.lookup(tokens, 12).num_tokens == 12
