"""One engine's KV cache manager.

The scheduler counts in tokens, the pools in pages of their group's size. Not thread-safe: the engine thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence

from baton.errors import CapacityError
from baton.kv.block_tables import BlockTables, Destination
from baton.kv.geometry import NULL_PAGE
from baton.kv.hits import agreed, cut, look_up
from baton.kv.interval import Interval
from baton.kv.page_pool import PrefixHit
from baton.kv.spec import GroupSpec, Owner
from baton.kv.state_pool import StatePool
from baton.kv.windows import page_pool

CopyPage = Callable[[str, int, int], None]

# A checkpoint of a state is as large as the KV of thousands of tokens.
CHECKPOINT_TOKENS = 256

OWNERS: tuple[Owner, Owner] = ("target", "draft")


class KVCache:
    """`num_pages` per group includes the null page. `num_lookahead_slots`: token slots after a request's tokens, for
    drafts. `copy_page(group, source, destination)` copies one page before it returns. `checkpoint_tokens`: the minimum
    between state checkpoints."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_pages: Mapping[str, int],
        num_lookahead_slots: int,
        copy_page: CopyPage,
        enable_prefix_caching: bool = True,
        checkpoint_tokens: int = CHECKPOINT_TOKENS,
    ) -> None:
        self.rules = {group.name: group.rules for group in groups}
        # Token counts that fill whole pages in every group.
        self.whole_pages = math.lcm(*(group.page_size for group in groups))
        self.checkpoint_interval = -(-checkpoint_tokens // self.whole_pages) * self.whole_pages
        self._states = {
            group.name: StatePool(
                num_pages[group.name], self.checkpoint_interval, enable_prefix_caching, self.whole_pages
            )
            for group in groups
            if group.kind == "state"
        }
        self._states_of: dict[Owner, dict[str, StatePool]] = {
            owner: {group.name: self._states[group.name] for group in groups if _is_state(group, owner)}
            for owner in OWNERS
        }
        self.pools = {
            group.name: self._states.get(group.name) or page_pool(group, num_pages[group.name], enable_prefix_caching)
            for group in groups
        }
        self.num_lookahead_slots = num_lookahead_slots
        self._copy_page = copy_page
        self._windowed = [group.name for group in groups if group.window is not None]
        self._num_scratch = {group.name: group.rules.num_scratch(num_lookahead_slots) for group in groups}

    def fits(self, num_tokens: int) -> bool:
        return all(
            self._num_pages(name, num_tokens) + self._num_scratch[name] < pool.num_pages
            for name, pool in self.pools.items()
        )

    def _num_pages(self, group: str, num_tokens: int) -> int:
        return self.rules[group].num_pages(num_tokens + self.num_lookahead_slots, self.pools[group].page_size)

    def attach(self, tables: BlockTables, tokens: Sequence[int], num_tokens: int, num_rows: int) -> int | None:
        """Attach a prefix hit to a request, and allocate pages for the next `num_rows` of its first `num_tokens`
        tokens.

        At least one row is left to compute, for its logits or features. Returns the hit, common to all groups, or None,
        without changes, if there are too few pages.
        """
        prefix_hits = self.find(tables, tokens, num_tokens)
        common = min(hit.num_tokens for hit in prefix_hits.values())
        # If there is no page to copy a partly hit page into, use the hit's whole pages only, or none.
        for most in dict.fromkeys((common, common // self.whole_pages * self.whole_pages, 0)):
            hits = cut(self.pools, tables, tokens, prefix_hits, most)
            start = min(most, *(hit.num_tokens for hit in hits.values()))
            if self._take(tables, hits, dict.fromkeys(self.pools, start), start + min(num_rows, num_tokens - start)):
                return start
        return None

    def find(self, tables: BlockTables, tokens: Sequence[int], num_tokens: int, spare: int = 0) -> dict[str, PrefixHit]:
        """The prefix hits that `attach` would start with now. The shortest is common to all groups. `spare`: window
        entries before what the next query sees.
        """
        hits = look_up(self.pools, tables, tokens, num_tokens - 1, spare)
        return agreed(self.pools, tables, tokens, hits, spare)

    def lacks_draft(self, tables: BlockTables, tokens: Sequence[int], num_tokens: int) -> bool:
        """Whether the prefix hit of the drafter's groups lacks a page of the target's."""
        hits = look_up(self.pools, tables, tokens, num_tokens - 1)
        found: dict[bool, int] = {}
        for name, hit in hits.items():
            is_target = self.rules[name].module == 0
            found[is_target] = min(hit.num_tokens, found.get(is_target, num_tokens))
        return found[True] - found.get(False, num_tokens) >= self.whole_pages

    def attach_destination(
        self, tables: BlockTables, tokens: Sequence[int], num_tokens: int, sent_groups: Container[str] | None = None
    ) -> Destination | None:
        """Allocate the destination pages of a handoff: for all `num_tokens` tokens and the next one.

        `sent_groups`: the groups that the peer sends, None for all. Their hits may differ. Other groups start at their
        common hit if their entries need tokens only. If they need the target's features, missing entries are never
        computed: they get no hit, and enter nothing into the prefix cache.

        Pages that the handoff writes are exclusive; pages before a window's first wanted entry are null. Returns None,
        without changes, if there are too few pages.
        """
        prefix_hits = look_up(self.pools, tables, tokens, num_tokens)
        cold = [name for name in self.pools if sent_groups is not None and name not in sent_groups]
        hits = {name: rules.hit(prefix_hits[name].num_tokens, num_tokens) for name, rules in self.rules.items()}
        lost = {name for name in cold if self.rules[name].module is not None}
        hits |= dict.fromkeys(lost, 0)
        if alone := [name for name in cold if name not in lost]:
            prefix_hits |= agreed(self.pools, tables, tokens, {name: prefix_hits[name] for name in alone})
            hits |= dict.fromkeys(alone, min(prefix_hits[name].num_tokens for name in alone))
        whole = {name: hit - hit % self.pools[name].page_size for name, hit in hits.items()}
        if not self._take(tables, prefix_hits, hits, num_tokens + 1):
            hits = whole
            if not self._take(tables, prefix_hits, hits, num_tokens + 1):
                return None
        tables.uncached |= lost
        wanted = {name: self.rules[name].wanted(num_tokens, hits[name]) for name in self.pools if name not in cold}
        for name in self._windowed:
            if name in wanted and wanted[name].start > hits[name]:
                # The first page is only partly wanted.
                tables.entered[name] = -(-wanted[name].start // self.pools[name].page_size)
                self._free_before(tables, name, wanted[name].start)
        return Destination(hits, wanted)

    def _take(
        self, tables: BlockTables, found: Mapping[str, PrefixHit], hits: Mapping[str, int], num_tokens: int
    ) -> bool:
        """Share the hits' whole pages, copy partly hit ones, and allocate the rest, for all groups or for none."""
        counts: dict[str, tuple[int, list[int], int]] = {}
        taken_over: set[str] = set()
        for name, pool in self.pools.items():
            whole, rest = (0, hits[name]) if name in self._states else divmod(hits[name], pool.page_size)
            held = found[name].pages[: whole + (rest > 0)]
            num_fresh = self._num_pages(name, num_tokens) - whole
            num_unused = pool.count_evictable(held)
            lacking = num_fresh + self._num_scratch[name] - (pool.num_available - num_unused)
            if name in self._states and lacking == num_unused == 1:
                taken_over.add(name)
            elif lacking > 0:
                return False
            counts[name] = whole, held, num_fresh
        for name, pool in self.pools.items():
            whole, held, num_fresh = counts[name]
            pool.share(held)
            if name in taken_over:
                pages = held
                pool.forget(held)
            else:
                pages = held[:whole] + pool.allocate(num_fresh, (held[whole - 1] or None) if whole else None)
                for source in held[whole:]:
                    self._copy_page(name, source, pages[whole])
                    pool.copied(source, pages[whole])
                    pool.release([source])
            tables.set_pages(name, pages)
            tables.entered[name] = whole
        for name in self._states:
            tables.scratch[name] = self.pools[name].allocate(self._num_scratch[name])
        return True

    def reserve(self, tables: BlockTables, num_tokens: int) -> bool:
        """Extend every block table. False, without changes, if there are too few pages."""
        if num_tokens <= tables.room:
            return True
        missing = {name: self._num_pages(name, num_tokens) - len(tables.pages[name]) for name in self.pools}
        if any(count > self.pools[name].num_available for name, count in missing.items()):
            return False
        for name, count in missing.items():
            if count > 0:
                pages = tables.pages[name]
                tables.set_pages(name, pages + self.pools[name].allocate(count, pages[-1] if pages else None))
        paged = ((pool, tables.pages[name]) for name, pool in self.pools.items() if name not in self._states)
        tables.room = min((len(pages) * pool.page_size for pool, pages in paged), default=0) - self.num_lookahead_slots
        return True

    def plan_checkpoints(
        self, tables: BlockTables, tokens: Sequence[int], start: int, stop: int, owner: Owner = "target"
    ) -> None:
        """Allocate slots for checkpoints within rows [start, stop) of known tokens (docs/lifecycle.md, "Kinds of
        cache"). A drafter's rows are always known.

        They take at most half of the slots that are free or hold older checkpoints (or the only one), latest first.
        """
        for name, pool in self._states_of[owner].items():
            chain = tables.chains[name]
            ends = pool.last(start + 1, stop + 1) if owner == "draft" or stop == len(tokens) else []
            wanted = sorted({*pool.due(start + 1, stop), *ends} - {stop})
            due = [count for count in wanted if not pool.holds(tokens, count, chain)]
            if due and due[-1:] == ends:
                self._replace_end(tables, name, due[-1])
            # `accept` takes the checkpoint after the last row, at the end of the step.
            spare = pool.num_available - len(pool.last(stop, stop + 1))
            most = max(min(spare, 1), pool.num_available // 2)
            due = due[max(0, len(due) - most) :]
            tables.checkpoints[name] |= zip(due, pool.allocate(len(due)), strict=True)

    def _replace_end(self, tables: BlockTables, group: str, num_tokens: int) -> None:
        """Allocate a checkpoint for this token count, replacing the last one that is at no multiple of the interval."""
        pool, chain = self._states[group], tables.chains[group]
        before = tables.ends.pop(group, 0) // pool.step
        if 0 < before <= len(chain):  # otherwise there was no slot for it
            pool.forget_chain([chain[before - 1]])
        if num_tokens % pool.interval:
            tables.ends[group] = num_tokens

    def accept(self, tables: BlockTables, num_accepted: int, num_computed: int, owner: Owner = "target") -> None:
        """Update the states after a step. `num_accepted`: drafts, 0 for a prefill and for a drafter. The state that
        has seen `num_computed` tokens becomes the request's; all other slots are scratch."""
        for name, pool in self._states_of[owner].items():
            scratch, pages = tables.scratch[name], tables.pages[name]
            first, stop = num_computed - num_accepted, num_computed + 1
            for count in sorted({*pool.due(first, stop), *pool.last(first, stop)}):
                self._replace_end(tables, name, count)
                if pool.num_available:
                    (slot,) = pool.allocate(1)
                    self._copy_page(name, scratch[count - num_computed + num_accepted], slot)
                    tables.checkpoints[name][count] = slot
            scratch[num_accepted], pages[0] = pages[0], scratch[num_accepted]
            tables.set_pages(name, pages)

    def num_final(
        self, group: str, num_known: int, num_computed: int, num_drafted: int, *, seeded: bool = False
    ) -> int:
        rules = self.rules[group]
        return rules.final(num_known, num_computed if rules.module == 0 else num_drafted, seeded=seeded)

    def advance(self, tables: BlockTables, tokens: Sequence[int], num_computed: int, num_drafted: int) -> None:
        """Enter newly final pages and checkpoints into the prefix cache."""
        for name, states in self._states.items():
            for count, slot in tables.checkpoints[name].items():
                states.enter(tokens, count, slot, tables.chains[name])
            states.release(tables.checkpoints.pop(name).values())
        for name, pool in self.pools.items():
            computed = num_computed if self.rules[name].module == 0 else num_drafted
            if name in self._states or computed // pool.page_size <= tables.entered[name]:
                continue
            final = self.num_final(name, len(tokens), num_computed, num_drafted)
            if final // pool.page_size > tables.entered[name] and name not in tables.uncached:
                first, chain = tables.entered[name], tables.chains[name]
                tables.entered[name] = pool.cache(tokens, tables.pages[name], chain, final, first)

    def slide(
        self, tables: BlockTables, num_known: int, num_computed: int, num_drafted: int, first_drafted: int = 0
    ) -> None:
        """Free the pages that no later query of a window sees. A drafter's pages begin with entry `first_drafted`. No
        prefix store may be reading them, nor any peer except those `offered`.
        """
        for name in self._windowed:
            # Entries that are not final are computed again.
            next_query = self.num_final(name, num_known, num_computed, num_drafted)
            if self.rules[name].module != 0:
                next_query = max(0, next_query - first_drafted)
            self._free_before(tables, name, self.rules[name].first_needed(next_query))

    def offered(self, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        """The block tables that a peer may read: none reads pages that a window frees."""
        pages = dict(tables.pages)
        for name in self._windowed:
            first = self.rules[name].wanted(num_tokens, 0).start // self.pools[name].page_size
            pages[name] = [NULL_PAGE] * first + pages[name][first:]
        return pages

    def _free_before(self, tables: BlockTables, group: str, token: int) -> None:
        pool, first = self.pools[group], tables.slid.get(group, 0)
        stop = token // pool.page_size
        if stop > first:
            pages = tables.pages[group]
            pool.release(pages[first:stop])
            tables.set_pages(group, [NULL_PAGE] * stop + pages[stop:])
            tables.slid[group] = stop

    def release(self, tables: BlockTables) -> None:
        self._release_scratch(tables)
        for name, pages in tables.take().items():
            self.pools[name].release(pages)

    def forget(self, tables: BlockTables) -> None:
        """Remove from the prefix cache what a request found there or entered."""
        for name, pool in self.pools.items():
            pool.forget_chain(tables.chains[name])

    def _release_scratch(self, tables: BlockTables) -> None:
        for name, slots in tables.scratch.items():
            self.pools[name].release([*slots, *tables.checkpoints[name].values()])

    def quarantine(self, tables: BlockTables, wanted: Mapping[str, Interval]) -> BlockTables:
        """Release a request's pages, but keep those from the first wanted token on out of use."""
        held = BlockTables()
        held.chains, held.uncached, held.entered = tables.chains, set(tables.uncached), dict(tables.entered)
        self._release_scratch(tables)
        for name, pages in tables.take().items():
            pool = self.pools[name]
            if name not in wanted:
                pool.release(pages)
                continue
            num_shared = min(wanted[name].start // pool.page_size, len(pages))
            pool.release(pages[num_shared:], quarantine=True)
            pool.release(pages[:num_shared])
            held.set_pages(name, [NULL_PAGE] * num_shared + pages[num_shared:])
        return held

    def leave_quarantine(self, held: BlockTables, tokens: Sequence[int], proven: Mapping[str, int]) -> None:
        """The pages are quiet. Those within a group's first `proven` entries enter the prefix cache."""
        uncached, entered = held.uncached, held.entered  # `take` clears them
        for name, pages in held.take().items():
            pool = self.pools[name]
            if name not in uncached and name not in self._states:
                pool.cache(tokens, pages, held.chains[name], proven.get(name, 0), entered.get(name, 0))
            pool.receive(pages)
            pool.leave_quarantine(pages)

    def spare(self) -> BlockTables | None:
        """Tables for one token and its lookahead slots that belong to no request. None if there are too few pages."""
        tables = BlockTables()
        try:
            for name, pool in self.pools.items():
                tables.set_pages(name, pool.allocate(self._num_pages(name, 1)))
        except CapacityError:
            self.release(tables)
            return None
        return tables


def _is_state(group: GroupSpec, owner: Owner) -> bool:
    return group.kind == "state" and group.owner == owner
