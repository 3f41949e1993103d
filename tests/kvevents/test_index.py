"""The router's index says what an engine's prefix cache holds, whatever came and went there."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from baton.errors import ConfigError, ProtocolError
from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.prefix import salted_root
from baton.kv.spec import GroupSpec, kv_planes
from baton.kvevents.config import KVEventsConfig
from baton.kvevents.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    decode_batch,
    encode_batch,
)
from baton.kvevents.publisher import EventPublisher
from baton.kvevents.recorder import EventRecorder
from baton.router.index.blocks import BlockIndex
from baton.router.index.readers import read_sources
from baton.router.index.subscriber import BatchOrder
from baton.router.prefixes import PromptBlocks

_PLANES = kv_planes(1, 1, "uint8")


def _group(name: str, page_size: int, **fields: Any) -> GroupSpec:
    settings = {"owner": "target", "kind": "full", "planes": _PLANES, "layer_ids": (0,), **fields}
    return GroupSpec(name=name, page_size=page_size, **settings)


GROUPS = {
    "full": [_group("full", 4)],
    "drafter": [_group("full", 4), _group("draft", 8, owner="draft", module=1)],
    "window": [_group("full", 4), _group("window", 4, kind="sliding_window", window=9)],
}


class _Watched(EventPublisher):
    """A publisher without sockets and thread."""

    def __init__(self) -> None:
        self.recorder = EventRecorder(1 << 20)


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, size: int = 4, **fields: Any) -> BlockStored:
    settings = {"lora_id": None, "medium": "GPU", "lora_name": None, **fields}
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=size, **settings)


@pytest.mark.parametrize("kind", sorted(GROUPS))
@pytest.mark.parametrize("seed", range(3))
def test_the_index_agrees_with_the_prefix_cache(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    groups = GROUPS[kind]
    cache = KVCache(groups, {group.name: 24 for group in groups}, 0, lambda *_: None)
    events, index = _Watched(), BlockIndex(has_salt_keys=True)
    events.watch(cache, groups)
    known: list[tuple[list[int], str | None]] = []
    coarse = max(group.page_size for group in groups)
    hits = 0
    for _ in range(150):
        salt = rng.choice((None, None, "tenant"))
        beginning = rng.choice(known)[0] if known and rng.random() < 0.7 else []
        tokens = beginning[: rng.randrange(0, 40)] + [rng.randrange(3) for _ in range(rng.randrange(1, 24))]
        tables = BlockTables(salted_root(salt))
        if cache.attach(tables, tokens, len(tokens), len(tokens)) is None:
            continue
        cache.advance(tables, tokens, len(tokens), len(tokens) - 1)
        cache.release(tables)
        known.append((tokens, salt))
        index.apply(*decode_batch(encode_batch(EventBatch(0.0, events.recorder.take()))).events)
        asked, salt = rng.choice(known)
        found = cache.find(BlockTables(salted_root(salt)), asked, len(asked))
        real = min(hit.num_tokens for hit in found.values())
        told = index.num_tokens(PromptBlocks(asked, salt))
        # The engine also reuses parts of pages. A drafter's last block depends on a token that may differ.
        assert told <= real + coarse, (asked, salt)
        assert told >= real - real % coarse - coarse * (kind == "window"), (asked, salt)
        hits += told > 0
    assert hits > 15
    assert index.num_blocks == sum(len(pool._by_hash) for pool in cache.pools.values())
    assert index.num_unknown == 0


def test_all_groups_must_hold_it() -> None:
    """Events of a drafter's group say whether its KV is there."""
    index, tokens = BlockIndex(), list(range(17))
    index.apply(stored([1, 2, 3, 4], tokens[:16], group_idx=0, kv_cache_spec_kind="full_attention"))
    assert index.num_tokens(PromptBlocks(tokens)) == 16
    index.apply(stored([5], tokens[:4], group_idx=1, kv_cache_spec_kind="full_attention"))
    assert index.num_tokens(PromptBlocks(tokens)) == 4
    index.apply(stored([6, 7], tokens[4:12], 5, group_idx=1, kv_cache_spec_kind="full_attention"))
    assert index.num_tokens(PromptBlocks(tokens)) == 12
    index.apply(BlockRemoved(block_hashes=[2], medium="GPU", group_idx=0))
    assert index.num_tokens(PromptBlocks(tokens)) == 4


def test_a_prefix_ends_where_a_window_or_state_can_continue() -> None:
    tokens = list(range(33))
    index = BlockIndex()
    index.apply(stored(list(range(1, 9)), tokens[:32], kv_cache_spec_kind="full_attention"))
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    index.apply(stored(list(range(1, 9)), tokens[:32], **window))
    index.apply(BlockRemoved(block_hashes=[1, 2, 3, 4], medium="GPU", group_idx=1))
    assert index.num_tokens(PromptBlocks(tokens)) == 32, "the window is whole"
    index.apply(BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1))
    assert index.num_tokens(PromptBlocks(tokens)) == 24
    state = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}
    index.apply(stored([1, 2], tokens[:32], size=16, **state))
    index.apply(BlockRemoved(block_hashes=[2], medium="GPU", group_idx=2))
    assert index.num_tokens(PromptBlocks(tokens)) == 0, "after 16 tokens there is a state, but no window"
    index = BlockIndex()
    index.apply(stored(list(range(1, 9)), tokens[:32]))
    index.apply(stored([1], tokens[:16], size=16, **state))
    assert index.num_tokens(PromptBlocks(tokens)) == 16


def test_a_window_or_state_begins_with_a_block_whose_parent_other_groups_hold() -> None:
    """A decode engine gets the end of a window, and keeps no state before it. The order of groups is any."""
    tokens, index = list(range(33)), BlockIndex()
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    ends = stored([b"5", b"6"], tokens[16:24], b"4", **window), stored([b"6"], tokens[20:24], b"5", group_idx=2)
    full = stored([b"1", b"2", b"3", b"4", b"5", b"6"], tokens[:24], group_idx=1)
    index.apply(*ends, full)
    assert (index.num_tokens(PromptBlocks(tokens)), index.num_unknown) == (0, 0), (
        "group 2 has no block before its only one"
    )
    index = BlockIndex()
    index.apply(ends[0], full)
    assert (index.num_tokens(PromptBlocks(tokens)), index.num_unknown) == (24, 0)
    index.apply(stored([b"8"], tokens[28:32], b"7", **window), BlockRemoved(block_hashes=[b"8"], medium="GPU"))
    index.apply(stored([b"7", b"8"], tokens[24:32], b"6", group_idx=1))
    assert (index.num_tokens(PromptBlocks(tokens)), index.num_unknown) == (24, 1), (
        "it was gone before it could be known"
    )
    other = stored([b"a"], tokens[8:16], b"1", size=8, group_idx=3)
    index.apply(other)
    assert index.num_unknown == 2, "blocks of other sizes have other keys"


def test_salts_adapters_and_images_are_apart() -> None:
    index, tokens = BlockIndex(), list(range(9))
    index.apply(stored([b"a", b"b"], tokens[:8], extra_keys=[("tenant",), None]))
    index.apply(stored([b"c"], tokens[:4], cache_salt="sglang"))
    index.apply(stored([b"d"], tokens[:4], lora_name="adapter"))
    index.apply(stored([b"e"], tokens[:4], extra_keys=[(("hash of an image", 1),)]))
    assert index.num_tokens(PromptBlocks(tokens)) == 0
    assert index.num_tokens(PromptBlocks(tokens, "tenant")) == 8
    assert index.num_tokens(PromptBlocks(tokens, "sglang")) == 4


def test_events_of_all_ages() -> None:
    """Maps of vLLM since 0.32 and of SGLang, arrays of earlier ones."""
    maps = [
        {"type": "BlockStored", "block_hashes": [b"h"], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2,
         "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "what_comes_later": 1},
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]  # fmt: skip
    arrays = [["BlockStored", [7], None, [1, 2], 2, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]]
    for events in (maps, arrays):
        batch = decode_batch(msgspec.msgpack.encode([1.5, events, None]))
        assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
        assert isinstance(batch.events[0], BlockStored)
        assert (batch.events[0].token_ids, batch.events[0].block_size) == ([1, 2], 2)


@pytest.mark.parametrize(
    "bad", [[1.5, [["BlockMoved"]]], [1.5, [{"type": "BlockStored"}]], [1.5], "x", [1.5, [3]], [1.5, [[[[]]]]]]
)
def test_a_malformed_batch_is_refused(bad: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode_batch(msgspec.msgpack.encode(bad))


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], [1, 2, 3]),
        stored([1], [1, 2, 3, 4], parent=9),
        stored([1], [], size=0),
        stored([1], [1, 2, 3, 4], group_idx=-1),
        stored([1], [1, 2, 3, 4], group_idx=1000),
        stored([1], [2**64 - 1, 2, 3, 4]),
        stored([b"x" * 65], [1, 2, 3, 4]),
    ],
)
def test_nonsense_is_counted_and_held_by_nobody(event: KVEvent) -> None:
    index = BlockIndex()
    index.apply(event)
    assert (index.num_blocks, index.num_unknown) == (0, 1)


def test_other_media_are_not_computed_with() -> None:
    index, tokens = BlockIndex(), list(range(5))
    index.apply(stored([1], tokens[:4], medium="CPU"))
    assert index.num_tokens(PromptBlocks(tokens)) == 0
    index.apply(stored([1], tokens[:4]))
    index.apply(BlockRemoved(block_hashes=[1], medium="STORAGE"))
    assert index.num_tokens(PromptBlocks(tokens)) == 4


def test_memory_is_bounded() -> None:
    index = BlockIndex(max_blocks=100)
    for number in range(1000):
        index.apply(stored([number], [number] * 4))
    assert index.num_blocks <= 100
    assert index.num_tokens(PromptBlocks([999] * 5)) == 4
    many = list(range(5000, 6000))
    index.apply(stored(many, many * 4))
    assert index.num_blocks <= 100, "also of one event"
    recorder = EventRecorder(10)
    told = _Watched()
    told.recorder = recorder
    groups = GROUPS["full"]
    cache = KVCache(groups, {"full": 64}, 0, lambda *_: None)
    told.watch(cache, groups)
    tokens, tables = list(range(100)), BlockTables()
    assert cache.attach(tables, tokens, 100, 100) == 0
    cache.advance(tables, tokens, 100, 100)
    assert isinstance(recorder.take()[0], AllBlocksCleared), "who could not be told all forgets all"
    assert recorder.num_lost > 0


@pytest.mark.parametrize("bad", [b"x" * 65, 7], ids=["hash", "token"])
def test_memory_is_bounded_though_each_event_ends_with_a_bad_block(bad: bytes | int) -> None:
    index = BlockIndex(max_blocks=100)
    for number in range(1000):
        index.apply(stored([number + 10, bad], [number] * 7 + [1 if isinstance(bad, bytes) else 1 << 63]))
    assert index.num_unknown == 1000
    assert index.num_blocks <= 100


def test_order_gaps_and_restarts() -> None:
    index = BlockIndex()
    order, prompt = BatchOrder(index), PromptBlocks(list(range(5)))
    batch = EventBatch(1.0, [stored([1], [0, 1, 2, 3])])
    assert order.is_gap(3)
    assert not order.is_gap(0)
    order.follow(0, batch)
    assert index.num_tokens(prompt) == 4
    assert order.is_gap(2)
    order.lost(2)
    assert (index.num_tokens(prompt), order.num_gaps) == (0, 1)
    order.follow(2, batch)
    order.note_start(1, EventBatch(0.5, []))
    order.follow(1, EventBatch(0.5, [AllBlocksCleared()]))
    assert index.num_tokens(prompt) == 4, "a repetition"
    order.note_start(0, EventBatch(2.0, []))
    assert (index.num_tokens(prompt), order.num_restarts) == (0, 1), "another start of the engine"
    order.follow(0, EventBatch(2.0, []))
    assert order.expected == 1


def test_settings_are_vllms() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@a@m"}'
    config = KVEventsConfig.parse(text)
    assert config.enabled
    assert config.of_rank(2).endpoint == "tcp://*:5559"
    assert not KVEventsConfig.parse("{}").enabled
    urls = ["http://h:1=tcp://h:5557", "http://h:2#dp_rank=1=tcp://h:5558"]
    assert read_sources(urls, "x") == {"http://h:1": "tcp://h:5557", "http://h:2#dp_rank=1": "tcp://h:5558"}


@pytest.mark.parametrize(
    "bad", ['{"endpoint": "http://x"}', '{"hwm": 0}', '{"enable": 1}', "[]", '{"endpoint": "tcp://h:99999"}']
)
def test_malformed_settings_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config"):
        KVEventsConfig.parse(bad)


@pytest.mark.parametrize("bad", ["http://h:1", "tcp://h:5557", "http://h:1=file:///etc"])
def test_a_malformed_event_source_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="kv_event_source"):
        read_sources([bad], "kv_event_source")
