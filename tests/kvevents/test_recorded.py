"""Streams of events from real servers (`python -m tools.record_kv_events`): the index knows what they held."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.kvevents.messages import BlockRemoved, BlockStored, decode_batch
from baton.router.index.blocks import BlockIndex
from baton.router.index.subscriber import BatchOrder
from baton.router.prefixes import PromptBlocks

RECORDED = (Path(__file__).parent / "recorded").glob("*.json")
Message = tuple[int, bytes]  # sequence number, payload


@dataclass
class Recording:
    """`stream`: as it came. `prompts`: what the server found of each in its cache, `after` so many messages."""

    stream: list[Message]
    prompts: list[dict[str, Any]]
    block_size: int

    def held(self, index: BlockIndex, asked: dict[str, Any]) -> int:
        """What a router expects the server to find."""
        return index.num_tokens(PromptBlocks(asked["prompt"], asked["salt"])) // self.block_size * self.block_size


def read(name: str) -> Recording:
    found = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    frames = [[base64.b64decode(frame) for frame in message] for message in found["messages"]]
    stream = [(int.from_bytes(number, "big"), payload) for *_, number, payload in frames]
    return Recording(stream, found["prompts"], found["block_size"])


def follow(order: BatchOrder, stream: Iterable[Message]) -> None:
    """As `EventSubscriber` does without a replay socket."""
    for number, payload in stream:
        batch = decode_batch(payload)
        order.note_start(number, batch)
        if order.is_gap(number):
            order.lost(number)
        order.follow(number, batch)


NAMES = sorted(path.stem for path in RECORDED)
each = pytest.mark.parametrize("name", NAMES)


def test_streams_of_all_engines_are_recorded() -> None:
    assert NAMES == ["sglang", "vllm", "vllm-windows"]


@each
def test_the_index_knows_what_the_server_holds(name: str) -> None:
    """At each moment at which the server was asked."""
    recording = read(name)
    stream = recording.stream
    assert [number for number, _ in stream] == list(range(len(stream)))
    order, at = BatchOrder(index := BlockIndex()), 0
    for asked in recording.prompts:
        follow(order, stream[at : asked["after"]])
        at = asked["after"]
        assert recording.held(index, asked) == asked["cached"], (at, asked)
    assert (order.num_gaps, order.num_restarts, index.num_unknown) == (0, 0, 0)
    events = [event for _, payload in stream for event in decode_batch(payload).events]
    assert {type(event) for event in events} >= {BlockStored, BlockRemoved}, "some were evicted"
    cached = [asked["cached"] for asked in recording.prompts]
    assert sum(cached) > 200
    assert 0 in cached[1:]


@each
def test_duplicate_and_late_events_count_once(name: str) -> None:
    recording, rng = read(name), random.Random(0)
    order, at = BatchOrder(index := BlockIndex()), 0
    for asked in recording.prompts:
        while at < asked["after"]:
            follow(order, [recording.stream[at], recording.stream[rng.randrange(at + 1)]])
            at += 1
        assert recording.held(index, asked) == asked["cached"], (at, asked)
    assert (order.num_gaps, order.num_restarts) == (0, 0)


@each
@pytest.mark.parametrize("lost", [1, 7, "half"])
def test_after_a_gap_only_what_came_since_is_believed(name: str, lost: int | str) -> None:
    """As a router that starts then. It never expects more than the server holds."""
    recording = read(name)
    first = len(recording.stream) // 2 if lost == "half" else int(lost)
    gap, late = BatchOrder(index := BlockIndex()), BatchOrder(other := BlockIndex())
    follow(gap, recording.stream[: first - 1])
    at = first
    for asked in recording.prompts:
        if asked["after"] <= first:
            continue
        follow(gap, recording.stream[at : asked["after"]])
        follow(late, recording.stream[at : asked["after"]])
        at = asked["after"]
        found = recording.held(index, asked)
        assert found == recording.held(other, asked) <= asked["cached"]
    assert gap.num_gaps == late.num_gaps == 1


@each
def test_a_server_that_starts_again_begins_with_nothing(name: str) -> None:
    """Its numbers begin at 0 again, and its times do not."""
    recording = read(name)
    last = decode_batch(recording.stream[-1][1]).ts
    again = [(number, later(payload, last)) for number, payload in recording.stream]
    order = BatchOrder(index := BlockIndex())
    follow(order, recording.stream)
    at = 0
    for asked in recording.prompts:
        if asked["after"]:
            follow(order, again[at : asked["after"]])
            at = asked["after"]
            assert recording.held(index, asked) == asked["cached"], (at, asked)
    assert (order.num_gaps, order.num_restarts) == (0, 1)


def later(payload: bytes, seconds: float) -> bytes:
    """A batch that was sent so much later."""
    sent, *rest = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode([sent + seconds, *rest])
