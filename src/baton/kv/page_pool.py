"""Page pool of one group.

A page is in exactly one state: free, referenced (count >= 1), cached (count 0, content kept, evictable in LRU order) or
quarantined (its request has ended, but a transport may still touch it). Page 0 is the null page and is never allocated.
Owned by the engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.errors import CapacityError
from baton.kv.extents import Extents
from baton.kv.prefix import Chain, chain_hash, page_identity

# 1 / this of the pool is evicted in advance. Pages evicted one by one would be scattered (docs/performance.md,
# "Fragmentation").
EVICT_AHEAD = 50


# A block's digest, its parent's (None: it begins the prompt), its chain's root, and its identity tokens.
OnStored = Callable[[bytes, bytes | None, bytes, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached pages that hold a prefix of a token list, oldest first.

    If `num_tokens`, the valid entries, are not a multiple of the page size, the last page is partly hit and must be
    copied before anything is written after the hit. A request may also start after fewer tokens, but not after less
    than `least`.
    """

    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    least: int = 0


class PagePool:
    """Pages 1..num_pages-1, of `page_size` tokens each. `reach`: as `Rules.reach`."""

    def __init__(self, num_pages: int, page_size: int, reach: int = 0, enable_caching: bool = True) -> None:
        if num_pages < 2:
            raise CapacityError("a page pool needs at least one page besides the null page")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reach = reach
        self.enable_caching = enable_caching
        self._free = Extents(1, num_pages)
        self._num_ahead = num_pages // EVICT_AHEAD
        self._refs: dict[int, int] = {}  # by page, never 0
        self._quarantined: set[int] = set()
        self._received: set[int] = set()  # with content from another engine
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_hash: dict[bytes, int] = {}  # the page of a digest
        self._cached: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}  # by page: parent's digest, own, identity
        # Per parent, sorted by identity: the page with the longest common prefix is next to the insertion point.
        self._children: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        self.on_stored: OnStored | None = None
        self.on_removed: Callable[[bytes], None] | None = None
        self.version = 0  # incremented whenever a page enters or leaves the prefix cache

    @property
    def num_available(self) -> int:
        return self._free.num_pages + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return len(self._refs)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    def count_evictable(self, pages: Iterable[int]) -> int:
        return sum(page in self._evictable for page in pages)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` exclusive pages in as few runs as possible, starting right after page `after` if that is free.

        Raises `CapacityError`, without changes.
        """
        if count > self.num_available:
            raise CapacityError(f"{count} pages wanted, {self.num_available} available")
        if self._free.num_pages < count:
            self._evict(min(count - self._free.num_pages + self._num_ahead, len(self._evictable)))
        pages = self._free.take(count, after)
        self._refs.update(dict.fromkeys(pages, 1))
        self._received.difference_update(pages)
        return pages

    def _evict(self, count: int) -> None:
        evicted = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        for page in evicted:
            self._forget(page)
        self._free.add(evicted)

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page:
                self._evictable.pop(page, None)
                self._refs[page] = self._refs.get(page, 0) + 1

    def release(self, pages: Iterable[int], quarantine: bool = False) -> None:
        """Skips null pages. With `quarantine`, pages without references stay out of use until `leave_quarantine`."""
        free: list[int] = []
        # Tail first, so that a chain's last page is evicted before the pages that lead to it.
        for page in reversed(list(pages)):
            if page == 0:
                continue
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            del self._refs[page]
            if quarantine:
                self._forget(page)
                self._quarantined.add(page)
            elif page in self._cached:
                self._evictable[page] = None
            else:
                free.append(page)
        self._free.add(free)

    def leave_quarantine(self, pages: Iterable[int]) -> None:
        """Make the pages free, or cached if they have been entered meanwhile."""
        free: list[int] = []
        for page in pages:
            if page in self._quarantined:
                self._quarantined.discard(page)
                if page in self._cached:
                    self._evictable[page] = None
                else:
                    free.append(page)
        self._free.add(free)

    def receive(self, pages: Iterable[int]) -> None:
        """Mark these pages' content as another engine's, until they are allocated again."""
        self._received.update(page for page in pages if page)

    def copied(self, source: int, page: int) -> None:
        if source in self._received:
            self._received.add(page)

    def num_computed(self, pages: Sequence[int]) -> int:
        """How many pages come before the first received or missing one."""
        return next((i for i, page in enumerate(pages) if not page or page in self._received), len(pages))

    def forget(self, pages: Iterable[int]) -> None:
        """Remove pages from the prefix cache."""
        for page in pages:
            self._forget(page)

    def forget_chain(self, chain: Iterable[bytes]) -> None:
        """Unreferenced pages are free then."""
        pages = [self._by_hash[digest] for digest in chain if digest in self._by_hash]
        self.forget(pages)
        free = [page for page in pages if page in self._evictable]
        for page in free:
            del self._evictable[page]
        self._free.add(free)

    def _forget(self, page: int) -> None:
        entry = self._cached.pop(page, None)
        if entry is None:
            return
        self.version += 1
        parent, own, identity = entry
        if self.on_removed is not None:
            self.on_removed(own)
        del self._by_hash[own]
        siblings = self._children[parent]
        del siblings[bisect_left(siblings, (identity, page))]
        if not siblings:
            del self._children[parent]

    def cache(self, tokens: Sequence[int], pages: Sequence[int], chain: Chain, num_final: int, first: int = 0) -> int:
        """Enter the full, final pages of a request from page number `first` on. Returns the number of the next page.

        Entries [0, num_final) are final. `chain`: the known digests of the first pages; extended.
        """
        if not self.enable_caching:
            return first
        stop = max(first, min(num_final // self.page_size, len(pages)))
        for index in range(min(first, len(chain)), stop):
            identity = page_identity(tokens, index, self.page_size, self.reach)
            if identity is None:
                return max(first, index)
            parent = chain[index - 1] if index else chain.root
            if index == len(chain):
                chain.append(chain_hash(parent, identity))
            own, page = chain[index], pages[index]
            if index < first or page == 0 or own in self._by_hash or page in self._cached:
                continue
            self._enter(page, parent, own, identity)
            if self.on_stored is not None:
                self.on_stored(own, parent if index else None, chain.root, identity)
        return stop

    def _enter(self, page: int, parent: bytes, own: bytes, identity: tuple[int, ...]) -> None:
        self.version += 1
        self._by_hash[own] = page
        self._cached[page] = (parent, own, identity)
        insort(self._children.setdefault(parent, []), (identity, page))

    def lookup(self, tokens: Sequence[int], max_tokens: int, digests: Chain | None = None, spare: int = 0) -> PrefixHit:
        """The longest cached prefix of at most `max_tokens` entries. `digests`: as `chain` of `cache`; a waiting prompt
        is hashed only once. `spare`: for hits that begin with null pages."""
        pages: list[int] = []
        known = Chain() if digests is None else digests
        parent, index, size = known.root, 0, self.page_size
        while self.enable_caching and index * size < max_tokens:
            if index == len(known):
                identity = page_identity(tokens, index, size, self.reach)
                if identity is None:
                    break
                known.append(chain_hash(parent, identity))
            page = self._by_hash.get(known[index])
            if page is None:
                break
            pages.append(page)
            parent = known[index]
            index += 1
        num_tokens = min(index * size, max_tokens)
        if self.enable_caching and num_tokens == index * size and num_tokens < max_tokens:
            page, matched = self._partial_page(parent, tuple(tokens[num_tokens : num_tokens + size + self.reach]))
            if matched > 0:
                pages.append(page)
                num_tokens = min(num_tokens + matched, max_tokens)
        return PrefixHit(pages, num_tokens)

    def _partial_page(self, parent: bytes, rest: tuple[int, ...]) -> tuple[int, int]:
        """Of the pages after `parent`, the one with the most leading entries of `rest`, and their number."""
        best, best_len = 0, 0
        siblings = self._children.get(parent, [])
        place = bisect_left(siblings, (rest, 0))
        for identity, page in siblings[max(0, place - 1) : place + 1]:
            matched = _common_prefix(identity, rest) - self.reach
            if matched > best_len:
                best, best_len = page, matched
        return best, best_len

    def extend(self, tokens: Sequence[int], num_pages: int, chain: Chain) -> int:
        """Extend the digests to the first `num_pages` pages. Returns how many are known."""
        while len(chain) < num_pages:
            identity = page_identity(tokens, len(chain), self.page_size, self.reach)
            if identity is None:
                break
            chain.append(chain_hash(chain[-1] if chain else chain.root, identity))
        return min(len(chain), num_pages)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
