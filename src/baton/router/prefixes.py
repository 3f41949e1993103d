"""What an engine probably still holds of the prompts that a router has sent it.

A guess, and so a reason for a route alone: the engine looks into its prefix cache itself, and declines what it lacks
too much of.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

# Tokens to a hash. Less than the tokens of which it is worth to know whether they are there.
BLOCK_TOKENS = 16


def chain_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """16 bytes for each whole block of tokens, over it, all before it, and the salt of its request."""
    data, size = array("q", tokens).tobytes(), BLOCK_TOKENS * 8
    running, chain = hashlib.blake2b(salt.encode(), digest_size=16), []
    for start in range(0, len(data) - size + 1, size):
        running.update(data[start : start + size])
        chain.append(running.copy().digest())
    return chain


class KnownPrefixes:
    """Blocks of one engine, the least recently used of which go first.

    `step`: the engine finds prefixes again in multiples of so many tokens, 0 not at all. `kv_tokens`: how many it
    holds.
    """

    def __init__(self, step: int = 0, kv_tokens: int = 0) -> None:
        self._step = step
        self._most = kv_tokens // BLOCK_TOKENS if step else 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_tokens(self, chain: Sequence[bytes]) -> int:
        """How many tokens from the first on the engine should find."""
        found = next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain)) * BLOCK_TOKENS
        return found // self._step * self._step if self._step else 0

    def learn(self, chain: Sequence[bytes]) -> None:
        """The engine has the KV of these blocks. What comes first in a prompt goes last."""
        for block in reversed(chain[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def forget(self, chain: Sequence[bytes]) -> None:
        """The engine lacks some of these blocks."""
        for block in chain:
            self._blocks.pop(block, None)
