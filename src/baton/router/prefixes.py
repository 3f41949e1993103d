"""An estimate of the prefixes that engines hold, for routing."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.kvevents.messages import salt_key
from baton.wire import GenerateRequest

# Tokens per hash.
BLOCK_TOKENS = 16
KEY_BYTES = 8
# KV capacity, in tokens, of engines that do not report one.
_DEFAULT_TOKENS = 1 << 20
# A block unused for this long counts as evicted.
EXPIRY_S = 600.0


def chain_of(tokens: Sequence[int], salt: str = "", begun: Sequence[bytes] = ()) -> list[bytes]:
    """16 bytes per whole block, over it, all blocks before it, and the salt. `begun`: the first ones, if known."""
    chain, size = list(begun), BLOCK_TOKENS * 8
    parent = chain[-1] if chain else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    data = array("q", tokens[len(chain) * BLOCK_TOKENS :]).tobytes()
    for start in range(0, len(data) - size + 1, size):
        parent = hashlib.blake2b(parent + data[start : start + size], digest_size=16).digest()
        chain.append(parent)
    return chain


def next_key(parent: int, tokens: Sequence[int], extra: tuple[Any, ...] | None) -> int:
    """`parent` 0: the block begins a prompt."""
    data = parent.to_bytes(KEY_BYTES, "big") + array("q", tokens).tobytes()
    if extra:
        data += repr(extra).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=KEY_BYTES).digest(), "big")


class PromptKeys:
    """The keys of a prompt's whole blocks, for one block size and form of salt, computed lazily."""

    def __init__(self, tokens: Sequence[int], block_size: int, salt: str | None) -> None:
        self._tokens, self._size = tokens, block_size
        self._extra = (salt,) if salt else None
        self._keys: list[int] = []
        self.num_blocks = len(tokens) // block_size

    def key(self, index: int) -> int:
        while len(self._keys) <= index:
            start = len(self._keys) * self._size
            parent, extra = (self._keys[-1], None) if self._keys else (0, self._extra)
            self._keys.append(next_key(parent, self._tokens[start : start + self._size], extra))
        return self._keys[index]


class PromptBlocks:
    """The blocks of one prompt, hashed at most once. `tokens` must not change."""

    __slots__ = ("_begun", "_chain", "_keys", "salt", "tokens")

    def __init__(self, tokens: Sequence[int], salt: str | None = None, begun: Sequence[bytes] = ()) -> None:
        self.tokens, self.salt, self._begun = tokens, salt or "", begun
        self._chain: list[bytes] | None = None
        self._keys: dict[tuple[int, bool], PromptKeys] = {}

    def keys(self, block_size: int, has_salt_keys: bool) -> PromptKeys:
        """`has_salt_keys`: with `salt_key` in place of the salt."""
        key = block_size, has_salt_keys
        if key not in self._keys:
            salt = salt_key(self.salt) if self.salt and has_salt_keys else self.salt
            self._keys[key] = PromptKeys(self.tokens, block_size, salt)
        return self._keys[key]

    def chain(self) -> list[bytes]:
        if self._chain is None:
            self._chain = chain_of(self.tokens, self.salt, self._begun)
        return self._chain

    def followed_by(self, tokens: Sequence[int]) -> PromptBlocks:
        return PromptBlocks([*self.tokens, *tokens], self.salt, self.chain())


def prompt_of(request: GenerateRequest) -> PromptBlocks:
    """An adapter's KV is useless to other requests."""
    salt = request.cache_salt if request.adapter is None else f"{request.adapter} {request.cache_salt or ''}"
    return PromptBlocks(request.prompt_token_ids, salt)


class Prefixes(Protocol):
    """What one engine holds of prompts."""

    @property
    def learns(self) -> bool: ...

    def num_tokens(self, prompt: PromptBlocks) -> int:
        """The expected prefix hit; the last token is always computed."""
        ...

    def learn(self, prompt: PromptBlocks) -> None:
        """The engine has, or will have, the KV of this prompt."""
        ...

    def forget(self, prompt: PromptBlocks) -> None:
        """The engine lacks part of this prompt."""
        ...


class KnownPrefixes:
    """An LRU set of the blocks that one engine probably holds.

    `step`: prefix hits are multiples of this many tokens; 0: none. `kv_tokens`: the KV capacity; 0: unknown.
    """

    def __init__(
        self,
        step: int = 0,
        kv_tokens: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        expiry_s: float = EXPIRY_S,
    ) -> None:
        self._step, self._clock, self._expiry_s = step, clock, expiry_s
        self._max_blocks = (kv_tokens or _DEFAULT_TOKENS) // BLOCK_TOKENS if step else 0
        self._blocks: OrderedDict[bytes, float] = OrderedDict()

    @property
    def learns(self) -> bool:
        return self._max_blocks > 0

    def num_tokens(self, prompt: PromptBlocks) -> int:
        if not self._step or not self._blocks:
            return 0
        chain, since = prompt.chain(), self._clock() - self._expiry_s
        num = 0
        for block in chain:
            if self._blocks.get(block, since) <= since:
                break
            num += 1
        num_tokens = min(num * BLOCK_TOKENS, len(prompt.tokens) - 1)
        return num_tokens // self._step * self._step

    def learn(self, prompt: PromptBlocks) -> None:
        """A prompt's first blocks are evicted last."""
        if not self._max_blocks:
            return
        now, blocks = self._clock(), self._blocks
        for block in reversed(prompt.chain()[: self._max_blocks]):
            blocks[block] = now
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def forget(self, prompt: PromptBlocks) -> None:
        for block in prompt.chain():
            self._blocks.pop(block, None)
