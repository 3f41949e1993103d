"""The slots of a state group, and the checkpoints in them (docs/lifecycle.md, "Kinds of cache").

A checkpoint is at a multiple of `interval` tokens, or where a request's known tokens end at a multiple of `step`; the
next of these replaces the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.page_pool import PagePool, PrefixHit
from baton.kv.prefix import Chain, chain_hash, page_identity


class StatePool(PagePool):
    """Slots 1..num_pages-1. A checkpoint does not depend on earlier ones. `interval`: a multiple of `step`, by default
    equal to it."""

    def __init__(self, num_pages: int, interval: int, enable_caching: bool = True, step: int | None = None) -> None:
        super().__init__(num_pages, 1, 0, enable_caching)
        self._num_ahead = 0  # a request has one slot, so runs do not matter
        self.interval, self.step = interval, interval if step is None else step

    def due(self, start: int, stop: int) -> range:
        if not self.enable_caching:
            return range(0)
        return range(max(1, -(-start // self.interval)) * self.interval, stop, self.interval)

    def last(self, start: int, stop: int) -> list[int]:
        """The last multiple of `step` in [start, stop), if any."""
        count = (stop - 1) // self.step * self.step
        return [count] if self.enable_caching and count >= max(start, 1) else []

    def holds(self, tokens: Sequence[int], num_tokens: int, chain: Chain) -> bool:
        """Counts as a use of the checkpoint."""
        slot = self._by_hash.get(self._digest(tokens, num_tokens // self.step, chain))
        if slot is not None:
            self.share([slot])
            self.release([slot])
        return slot is not None

    def enter(self, tokens: Sequence[int], num_tokens: int, slot: int, chain: Chain) -> None:
        """Make a referenced `slot`, with the state after the first `num_tokens` tokens, a checkpoint unless one exists.
        `chain`: the known digests of the tokens; it is extended.
        """
        own = self._digest(tokens, num_tokens // self.step, chain)
        if own not in self._by_hash and slot not in self._cached:
            self._enter(slot, own, own, ())
            if self.on_stored is not None:
                count = num_tokens // self.step
                last = tokens[num_tokens - self.step : num_tokens]
                self.on_stored(own, chain[count - 2] if count > 1 else None, chain.root, last)

    def lookup(self, tokens: Sequence[int], max_tokens: int, digests: Chain | None = None, spare: int = 0) -> PrefixHit:
        """One slot, or none."""
        known = Chain() if digests is None else digests
        most = max_tokens // self.step * self.step if self._by_hash else 0
        for num_tokens in range(most, 0, -self.step):
            slot = self._by_hash.get(self._digest(tokens, num_tokens // self.step, known))
            if slot is not None:
                return PrefixHit([slot], num_tokens, num_tokens)
        return PrefixHit()

    def _digest(self, tokens: Sequence[int], count: int, chain: Chain) -> bytes:
        for index in range(len(chain), count):
            identity = page_identity(tokens, index, self.step, 0)
            assert identity is not None, "a state has seen unknown tokens"
            chain.append(chain_hash(chain[-1] if chain else chain.root, identity))
        return chain[count - 1]
