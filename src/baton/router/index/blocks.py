"""The blocks that one engine holds.

Block hashes are the engine's own, so each block gets a key of this index: a hash over the previous block's key, its
tokens and its extra keys. So do blocks of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.kvevents.messages import AllBlocksCleared, BlockHash, BlockStored, KVEvent
from baton.router.prefixes import PromptBlocks, PromptKeys, next_key

# Larger numbers are ignored: no engine has as many groups or such blocks.
_MAX_GROUPS = 64
_MAX_BLOCK_SIZE = 1 << 16
_MAX_HASH_BYTES = 64
_WINDOWS = ("sliding_window", "sliding_window_mla", "chunked_local_attention")
_STATES = ("mamba",)
_COMPUTABLE = (None, "GPU")  # media that an engine can compute from


@dataclass(slots=True)
class _Group:
    """One group of layers. `keys`: of held blocks, by the engine's hash. `held`: number of hashes per key: blocks of
    equal tokens differ if their KV depends on later ones.
    """

    block_size: int
    kind: str
    window: int
    keys: dict[BlockHash, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def cut(self, keys: PromptKeys, limit: int) -> int:
        """The longest prefix of at most `limit` tokens that this group can continue."""
        if self.kind in _STATES:
            return self._last_state(keys, limit)
        blocks = min(-(-limit // self.block_size), keys.num_blocks)
        if self.kind in _WINDOWS and self.window:
            return min(limit, self._window_end(keys, blocks))
        num = next((i for i in range(blocks) if keys.key(i) not in self.held), blocks)
        return min(limit, num * self.block_size)

    def _last_state(self, keys: PromptKeys, limit: int) -> int:
        """The end of the last state within `limit`: a state cannot be cut."""
        for blocks in range(limit // self.block_size, 0, -1):
            if keys.key(blocks - 1) in self.held:
                return blocks * self.block_size
        return 0

    def _window_end(self, keys: PromptKeys, blocks: int) -> int:
        """The end, in tokens, of the last block with a whole window before it."""
        run = 0  # held blocks from `end` backwards
        end = blocks
        for index in range(blocks - 1, -1, -1):
            if keys.key(index) in self.held:
                run += 1
                if run * self.block_size >= self.window - 1 or index == 0:
                    return end * self.block_size
            else:
                run, end = 0, index
        return 0


class BlockIndex:
    """The blocks of one engine, at most `max_blocks`; beyond that, the oldest tenth is dropped.

    `num_unknown`: ignored events, with an unknown parent or a number out of range.
    """

    def __init__(self, max_blocks: int = 1 << 20, has_salt_keys: bool = False) -> None:
        """`has_salt_keys`: events have `salt_key` instead of a salt."""
        self._max_blocks, self.has_salt_keys = max_blocks, has_salt_keys
        self._groups: dict[int, _Group] = {}
        self.num_blocks = self.num_unknown = 0

    def apply(self, *events: KVEvent) -> None:
        """A block's parent may be in another group, whose event may come later."""
        orphans: list[BlockStored] = []
        for event in events:
            if isinstance(event, BlockStored):
                if event.medium in _COMPUTABLE and not self._store(event):
                    orphans.append(event)
                continue
            orphans = self._adopt(orphans)  # blocks removed below were stored before
            if isinstance(event, AllBlocksCleared):
                self.clear()
            elif event.medium in _COMPUTABLE and (group := self._groups.get(event.group_idx or 0)) is not None:
                for own in event.block_hashes:
                    self._remove(group, own)
        self.num_unknown += len(self._adopt(orphans))

    def _adopt(self, orphans: list[BlockStored]) -> list[BlockStored]:
        """Returns the blocks whose parents are still unknown."""
        return [event for event in orphans if not self._store(event)]

    def clear(self) -> None:
        """The engine holds nothing, or what it holds is unknown."""
        self._groups.clear()
        self.num_blocks = 0

    def num_tokens(self, prompt: PromptBlocks) -> int:
        """How many tokens of the prompt the engine need not compute, at most all but one: the prefix that all groups
        hold.
        """
        if not self._groups:
            return 0
        limit = len(prompt.tokens) - 1
        num_tokens = -1
        # A window or state may end before the prefix of other groups, and then shortens theirs.
        while num_tokens != limit:
            num_tokens = limit
            for group in self._groups.values():
                limit = group.cut(prompt.keys(group.block_size, self.has_salt_keys), limit)
        return limit

    def _store(self, event: BlockStored) -> bool:
        """Returns False, without changes, if the parent is unknown."""
        if not event.block_hashes:
            return True  # from vLLM, for a block that left the window before it was full
        if not self._is_sane(event):
            self.num_unknown += 1
            return True
        before = event.parent_block_hash
        parent = 0 if before is None else self._key_of(before, event.block_size)
        if parent is None:
            return False
        group = self._group_of(event)
        try:
            for own, key in _keyed_blocks(event, parent):
                self._add(group, own, key)
        except OverflowError:
            self.num_unknown += 1
        while self.num_blocks > self._max_blocks:
            self._shrink()
        return True

    def _is_sane(self, event: BlockStored) -> bool:
        index, size = event.group_idx or 0, event.block_size
        if not (0 <= index < _MAX_GROUPS and 0 < size <= _MAX_BLOCK_SIZE):
            return False
        group = self._groups.get(index)
        is_full = len(event.token_ids) == size * len(event.block_hashes)
        return is_full and (group is None or group.block_size == size)

    def _group_of(self, event: BlockStored) -> _Group:
        index = event.group_idx or 0
        if index not in self._groups:
            kind, window = event.kv_cache_spec_kind or "", event.kv_cache_spec_sliding_window or 0
            self._groups[index] = _Group(event.block_size, kind, window)
        return self._groups[index]

    def _add(self, group: _Group, own: BlockHash, key: int) -> None:
        if own not in group.keys:
            group.keys[own] = key
            group.held[key] = group.held.get(key, 0) + 1
            self.num_blocks += 1

    def _key_of(self, block_hash: BlockHash, block_size: int) -> int | None:
        """The key of a block of any group; equal hashes have equal tokens. The parent of a window's first block, or of
        a state, is in groups of full attention only.
        """
        for group in self._groups.values():
            if group.block_size == block_size and (key := group.keys.get(block_hash)) is not None:
                return key
        return None

    def _remove(self, group: _Group, own: BlockHash) -> None:
        key = group.keys.pop(own, None)
        if key is None:
            return
        self.num_blocks -= 1
        group.held[key] -= 1
        if not group.held[key]:
            del group.held[key]

    def _shrink(self) -> None:
        for group in self._groups.values():
            for own in list(group.keys)[: -(-len(group.keys) // 10)]:
                self._remove(group, own)


def _keyed_blocks(event: BlockStored, parent: int) -> Iterator[tuple[BlockHash, int]]:
    """The event's blocks with their keys. Raises `OverflowError` for a token or hash out of range."""
    size, extra = event.block_size, event.extra_keys or []
    for number, own in enumerate(event.block_hashes):
        if isinstance(own, bytes) and len(own) > _MAX_HASH_BYTES:
            raise OverflowError("a block's hash is too long")
        keys = extra[number] if number < len(extra) else None
        if keys is None:
            begins_prompt = number == 0 and event.parent_block_hash is None
            name = (event.cache_salt if begins_prompt else None) or event.lora_name
            keys = (name,) if name else None
        parent = next_key(parent, event.token_ids[number * size : (number + 1) * size], keys)
        yield own, parent
