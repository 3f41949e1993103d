"""vLLM reads the events of Baton's engines with its own structs, and the router reads vLLM's."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed import kv_events as vllm_events

from baton.kvevents.messages import BlockStored, EventBatch, decode_batch, encode_batch
from baton.kvevents.recorder import EventRecorder, RecordedGroup


def test_vllm_decodes_batons_events() -> None:
    recorder = EventRecorder(100)
    target, draft = RecordedGroup(0, "full_attention", None, 2), RecordedGroup(1, "sliding_window", 8, 2)
    recorder.stored(target, b"a", None, b"tenant", [1, 2])
    recorder.stored(target, b"b", b"a", b"tenant", [3, 4])
    recorder.stored(draft, b"c", None, b"baton.prefix", [1, 2, 3])
    recorder.removed(target, b"b")
    payload = encode_batch(EventBatch(1.5, recorder.take(), 1))
    batch = msgspec.msgpack.decode(payload, type=vllm_events.KVEventBatch)
    first, second, removed = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 1)
    assert first.block_hashes == [97, 98], "as vLLM tells its own"
    assert first.token_ids == [1, 2, 3, 4]
    assert (first.block_size, first.medium, first.group_idx) == (2, "GPU", 0)
    assert first.extra_keys == [(b"tenant".hex(),), None]
    assert (second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert (removed.block_hashes, removed.group_idx) == ([98], 0)


def test_baton_decodes_vllms_events() -> None:
    stored = vllm_events.BlockStored(
        block_hashes=[7, b"x"],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[("salt",), None],
        group_idx=2,
        kv_cache_spec_kind="mamba",
        session_id="s",
    )
    cleared = vllm_events.AllBlocksCleared()
    removed = vllm_events.BlockRemoved(block_hashes=[7], medium="GPU")
    sent = vllm_events.KVEventBatch(ts=2.5, events=[stored, removed, cleared])
    batch = decode_batch(msgspec.msgpack.encode(sent))
    first = batch.events[0]
    assert isinstance(first, BlockStored)
    names = [name for name in BlockStored.__struct_fields__ if hasattr(stored, name)]
    assert len(names) >= 14
    assert [getattr(first, name) for name in names] == [getattr(stored, name) for name in names]
    assert [type(event).__name__ for event in batch.events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
