"""Records the changes of an engine's prefix caches as KV events. Written by the engine thread, read by another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.kv.prefix import ROOT
from baton.kvevents.messages import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_HASH_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A KV cache group as events describe it. `kind`: vLLM's name. `block_size`: in tokens."""

    index: int
    kind: str
    window: int | None
    block_size: int


class EventRecorder:
    """Events not published yet. `wake` is called when the first is added.

    Above `limit` all are dropped, and consumers are asked to clear their index.
    """

    def __init__(self, limit: int, wake: Callable[[], None] = lambda: None) -> None:
        self._limit, self.wake = limit, wake
        self._events: deque[KVEvent] = deque()
        self.num_lost = 0

    def stored(
        self, group: RecordedGroup, own: bytes, parent: bytes | None, root: bytes, tokens: Sequence[int]
    ) -> None:
        """`tokens`: a block's own and those after it that its KV depends on. `parent` None: it begins the prompt,
        whose chain has this `root`."""
        size = group.block_size
        extra: list[tuple[Any, ...] | None] | None = [(root.hex(),)] if parent is None and root != ROOT else None
        self._add(
            BlockStored(
                block_hashes=[_vllm_hash(own)],
                parent_block_hash=None if parent is None else _vllm_hash(parent),
                token_ids=list(tokens[:size]),
                block_size=size,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None,
                extra_keys=extra,
                group_idx=group.index,
                kv_cache_spec_kind=group.kind,
                kv_cache_spec_sliding_window=group.window,
                lookahead_token_ids=[list(tokens[size:])] if len(tokens) > size else None,
            )
        )

    def removed(self, group: RecordedGroup, own: bytes) -> None:
        self._add(BlockRemoved(block_hashes=[_vllm_hash(own)], medium=MEDIUM_GPU, group_idx=group.index))

    def _add(self, event: KVEvent) -> None:
        if len(self._events) >= self._limit:
            self.num_lost += len(self._events)
            self._events.clear()
            self._events.append(AllBlocksCleared())
        self._events.append(event)
        if len(self._events) == 1:
            self.wake()

    def take(self) -> list[KVEvent]:
        """Adjacent blocks of a chain are one event. May run on another thread."""
        events: list[KVEvent] = []
        while self._events:
            event = self._events.popleft()
            last = events[-1] if events else None
            if isinstance(event, BlockStored) and isinstance(last, BlockStored) and _follows(event, last):
                last.block_hashes += event.block_hashes
                last.token_ids += event.token_ids
                if last.extra_keys is not None:
                    last.extra_keys.append(None)
                if last.lookahead_token_ids is not None and event.lookahead_token_ids is not None:
                    last.lookahead_token_ids += event.lookahead_token_ids
            elif isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and _is_alike(event, last):
                last.block_hashes += event.block_hashes
            else:
                events.append(event)
        return events


def _vllm_hash(digest: bytes) -> int:
    """vLLM's default form of hashes: consumers such as Dynamo's take no bytes."""
    return int.from_bytes(digest, "big") & _HASH_MASK


def _follows(event: BlockStored, last: BlockStored) -> bool:
    return event.group_idx == last.group_idx and event.parent_block_hash == last.block_hashes[-1]


def _is_alike(event: BlockRemoved, last: BlockRemoved) -> bool:
    return event.group_idx == last.group_idx
