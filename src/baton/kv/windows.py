"""Pages of a sliding-window group.

A prefix hit needs only the entries that the next query sees. A decode engine gets no others, and pages that a window
has passed are evicted first, so earlier pages may be missing: in a hit they are null.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.geometry import NULL_PAGE
from baton.kv.interval import Rules
from baton.kv.page_pool import PagePool, PrefixHit
from baton.kv.prefix import Chain
from baton.kv.spec import GroupSpec


class WindowPool(PagePool):
    """`rules`: those of the group, which have its window in tokens."""

    def __init__(self, num_pages: int, page_size: int, rules: Rules, enable_caching: bool = True) -> None:
        super().__init__(num_pages, page_size, rules.reach, enable_caching)
        self._rules = rules

    def lookup(self, tokens: Sequence[int], max_tokens: int, digests: Chain | None = None, spare: int = 0) -> PrefixHit:
        """As `PagePool.lookup`, or a longer hit that begins with null pages, with up to `spare` entries before those
        that the next query sees."""
        known = Chain() if digests is None else digests
        whole, size = super().lookup(tokens, max_tokens, known), self.page_size
        stop = self.extend(tokens, -(-max_tokens // size), known) if self.enable_caching else 0
        while (end := min(stop * size, max_tokens)) > whole.num_tokens:
            needed, first = self._rules.first_needed(end), stop
            while first * size > max(needed - spare, 0) and known[first - 1] in self._by_hash:
                first -= 1
            if first * size <= needed:
                pages = [self._by_hash[digest] for digest in known[first:stop]]
                return PrefixHit([NULL_PAGE] * first + pages, end, self._min_start(first * size))
            stop = first - 1  # that page is missing
        return whole

    def _min_start(self, first: int) -> int:
        """The minimum number of tokens after which a request can start with the entries from `first` on."""
        return first + (self._rules.window or 1) - 1 if first else 0

    def held_from(self, tokens: Sequence[int], first: int, stop: int, chain: Chain) -> list[int]:
        """The cached pages among a prompt's pages [first, stop), up to the first missing one."""
        pages: list[int] = []
        for digest in chain[first : self.extend(tokens, stop, chain)]:
            if digest not in self._by_hash:
                break
            pages.append(self._by_hash[digest])
        return pages


def page_pool(group: GroupSpec, num_pages: int, enable_caching: bool) -> PagePool:
    if group.window is not None:
        return WindowPool(num_pages, group.page_size, group.rules, enable_caching)
    return PagePool(num_pages, group.page_size, group.rules.reach, enable_caching)
