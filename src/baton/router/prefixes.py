"""An estimate of what engines hold of the prompts that they were sent, used only for routing: an engine checks its own
prefix cache, and declines a prompt of which it lacks too much.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

# Tokens per hash. Fewer tokens than this do not matter for routing.
BLOCK_TOKENS = 16


def chain_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """A hash of 16 bytes per whole block of tokens, over it, all blocks before it, and the salt."""
    data, size = array("q", tokens).tobytes(), BLOCK_TOKENS * 8
    running, chain = hashlib.blake2b(salt.encode(), digest_size=16), []
    for start in range(0, len(data) - size + 1, size):
        running.update(data[start : start + size])
        chain.append(running.copy().digest())
    return chain


class KnownPrefixes:
    """An LRU set of the blocks that one engine holds. `step`: its prefix hits are multiples of this many tokens; 0: it
    has none. `kv_tokens`: its KV capacity.
    """

    def __init__(self, step: int = 0, kv_tokens: int = 0) -> None:
        self._step = step
        self._most = kv_tokens // BLOCK_TOKENS if step else 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_tokens(self, chain: Sequence[bytes]) -> int:
        """The expected prefix hit, in tokens."""
        found = next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain)) * BLOCK_TOKENS
        return found // self._step * self._step if self._step else 0

    def learn(self, chain: Sequence[bytes]) -> None:
        """The engine has the KV of these blocks. A prompt's first blocks are evicted last."""
        for block in reversed(chain[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def forget(self, chain: Sequence[bytes]) -> None:
        """The engine lacks some of these blocks."""
        for block in chain:
            self._blocks.pop(block, None)
