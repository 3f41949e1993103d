"""The slots of a state group, and the checkpoints kept in them.

A state cannot be truncated, so a prefix hit needs a checkpoint, taken at multiples of `interval` tokens. It occupies an
ordinary slot, is found by the hash chain of the tokens before it, and is evicted when a request needs the slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.pool import PagePool, PrefixHit
from baton.kv.prefix import Chain, chain_hash, page_identity


class StatePool(PagePool):
    """Slots 1..num_pages-1. A checkpoint does not depend on earlier ones."""

    def __init__(self, num_pages: int, interval: int, enable_caching: bool = True) -> None:
        super().__init__(num_pages, 1, 0, enable_caching)
        self._num_ahead = 0  # runs of single slots do not matter
        self.interval = interval

    def due(self, start: int, stop: int) -> range:
        if not self.enable_caching:
            return range(0)
        return range(max(1, -(-start // self.interval)) * self.interval, stop, self.interval)

    def holds(self, tokens: Sequence[int], num_tokens: int, chain: Chain) -> bool:
        """Counts as a use of the checkpoint."""
        slot = self._by_hash.get(self._digest(tokens, num_tokens // self.interval, chain))
        if slot is not None:
            self.share([slot])
            self.release([slot])
        return slot is not None

    def enter(self, tokens: Sequence[int], num_tokens: int, slot: int, chain: Chain) -> None:
        """Make `slot`, which is referenced and holds the state after the first `num_tokens` tokens, a checkpoint unless
        there is one. `chain`: the known digests; extended."""
        own = self._digest(tokens, num_tokens // self.interval, chain)
        if own not in self._by_hash and slot not in self._cached:
            self._enter(slot, own, own, ())
            if self.on_stored is not None:
                count = num_tokens // self.interval
                last = tokens[num_tokens - self.interval : num_tokens]
                self.on_stored(own, chain[count - 2] if count > 1 else None, chain.root, last)

    def lookup(self, tokens: Sequence[int], max_tokens: int, digests: Chain | None = None) -> PrefixHit:
        """One slot, or none."""
        known = Chain() if digests is None else digests
        for num_tokens in reversed(self.due(1, max_tokens + 1)):
            slot = self._by_hash.get(self._digest(tokens, num_tokens // self.interval, known))
            if slot is not None:
                return PrefixHit([slot], num_tokens)
        return PrefixHit()

    def _digest(self, tokens: Sequence[int], count: int, chain: Chain) -> bytes:
        for index in range(len(chain), count):
            identity = page_identity(tokens, index, self.interval, 0)
            assert identity is not None, "a state has seen unknown tokens"
            chain.append(chain_hash(chain[-1] if chain else chain.root, identity))
        return chain[count - 1]
