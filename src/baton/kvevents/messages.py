"""The messages of KV events, in the encoding of vLLM 0.32 and 0.33 (`vllm/distributed/kv_events.py`).

A batch is a msgpack array `[ts, events, data_parallel_rank]`; an event is a map whose "type" is its name. Fields at
their defaults are left out. Older vLLM and SGLang send events as arrays that begin with the name; `decode_batch` takes
both.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from baton.errors import ProtocolError
from baton.kv.prefix import salted_root

BlockHash = bytes | int
# The medium, on CPUs too.
MEDIUM_GPU = "GPU"
SEQUENCE_BYTES = 8
# The end marker of a replay.
END_SEQUENCE = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MAX_BATCH_BYTES = 16 << 20


# SGLang leaves such fields out if they are None; vLLM never does, and demands them.
_ALWAYS_SENT: Any = msgspec.field(default_factory=lambda: None)


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True): ...


class BlockStored(_Event):
    """Consecutive full blocks.

    - `parent_block_hash`: of the block before the first; None: the first begins the prompt.
    - `token_ids`: of all blocks, `block_size` each.
    - `extra_keys`: what the hash of each block depends on besides tokens. Baton's engines give a digest of the
      request's `cache_salt` (`salt_key`), in the first block of a prompt.
    - `group_idx`: the group of layers; a prefix needs all groups, the drafter's too.
    - `lookahead_token_ids`: per block, the tokens after it that its KV depends on (vLLM 0.33).
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = _ALWAYS_SENT
    medium: str | None = _ALWAYS_SENT
    lora_name: str | None = _ALWAYS_SENT
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None  # SGLang's place for the salt


class BlockRemoved(_Event):
    """Blocks left the prefix cache."""

    block_hashes: list[BlockHash]
    medium: str | None = _ALWAYS_SENT
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event):
    """The prefix cache is empty: forget all blocks of the engine."""


class _StoredArray(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """`ts`: seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Decoders:
    batch: ClassVar[msgspec.msgpack.Decoder[_RawBatch]] = msgspec.msgpack.Decoder(_RawBatch)
    maps: ClassVar[msgspec.msgpack.Decoder[KVEvent]] = msgspec.msgpack.Decoder(KVEvent)
    arrays: ClassVar[msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray]] = msgspec.msgpack.Decoder(
        _StoredArray | _RemovedArray | _ClearedArray
    )


def encode_batch(batch: EventBatch) -> bytes:
    return msgspec.msgpack.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Raises `ProtocolError`."""
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(f"a batch of events has {len(payload)} bytes, more than {MAX_BATCH_BYTES}")
    try:
        raw = _Decoders.batch.decode(payload)
        return EventBatch(raw.ts, [_event(event) for event in raw.events], raw.data_parallel_rank)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a batch of KV events is malformed: {error}") from None


def _event(raw: msgspec.Raw) -> KVEvent:
    first = memoryview(raw)[0]
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return _Decoders.maps.decode(raw)
    events = _Decoders.arrays.decode(raw)
    if isinstance(events, _StoredArray):
        return BlockStored(**msgspec.structs.asdict(events))
    return BlockRemoved(**msgspec.structs.asdict(events)) if isinstance(events, _RemovedArray) else AllBlocksCleared()


def salt_key(salt: str) -> str:
    """Stands for a `cache_salt` in events, whose readers cannot derive the salt."""
    return salted_root(salt).hex()
