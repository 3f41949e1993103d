"""Events over sockets: late and slow readers, gaps, restarts, and what is no event."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton.event_loop import timeout
from baton.kvevents.config import KVEventsConfig
from baton.kvevents.messages import END_SEQUENCE, BlockStored, EventBatch, decode_batch, encode_batch
from baton.kvevents.publisher import EventPublisher
from baton.kvevents.recorder import RecordedGroup
from baton.router.index.blocks import BlockIndex
from baton.router.index.subscriber import EventSubscriber
from baton.router.prefixes import PromptBlocks

GROUP = RecordedGroup(0, "full_attention", None, 4)
ROOT = b"baton.prefix"


def config(path: Path, replay: bool = True, buffer_steps: int = 100) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{path}/events",
        replay_endpoint=f"ipc://{path}/replay" if replay else None,
        buffer_steps=buffer_steps,
        topic="kv@pod@model",
    )


def store(publisher: EventPublisher, number: int) -> PromptBlocks:
    """Store one block, and return a prompt that begins with it."""
    publisher.recorder.stored(GROUP, bytes([number]), None, ROOT, [number] * 4)
    return PromptBlocks([number] * 5)


async def until_sent(publisher: EventPublisher, count: int) -> None:
    async with timeout(60):
        while publisher._sequence < count:
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def reading(settings: KVEventsConfig) -> AsyncIterator[EventSubscriber]:
    subscriber = EventSubscriber(BlockIndex(), settings.endpoint, settings.replay_endpoint)
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_held(subscriber: EventSubscriber, prompt: PromptBlocks) -> None:
    async with timeout(60):
        while subscriber.index.num_tokens(prompt) != 4:
            await asyncio.sleep(0.005)


async def test_a_router_that_comes_late_is_told_all(tmp_path: Path) -> None:
    with contextlib.closing(EventPublisher(config(tmp_path))) as publisher:
        prompts = []
        for number in range(3):
            prompts.append(store(publisher, number))
            await until_sent(publisher, number + 1)
        async with reading(config(tmp_path)) as subscriber:
            for prompt in prompts:
                await until_held(subscriber, prompt)
            assert (subscriber.sequence.expected, subscriber.sequence.num_gaps) == (3, 0)
            # A replay proves that the live feed is connected only once one of its batches came.
            async with timeout(60):
                while subscriber.sequence.expected == 3:
                    store(publisher, 7)
                    publisher.recorder.removed(GROUP, bytes([7]))
                    await asyncio.sleep(0.02)


async def test_blocks_whose_events_the_buffer_lost_are_forgotten(tmp_path: Path) -> None:
    with contextlib.closing(EventPublisher(config(tmp_path, buffer_steps=2))) as publisher:
        prompts = []
        for number in range(4):
            prompts.append(store(publisher, number))
            await until_sent(publisher, number + 1)
        async with reading(config(tmp_path)) as subscriber:
            await until_held(subscriber, prompts[3])
            assert subscriber.index.num_tokens(prompts[0]) == 0
            assert subscriber.sequence.num_gaps == 1


async def test_a_restarted_engine_begins_anew(tmp_path: Path) -> None:
    async with reading(config(tmp_path, replay=False)) as subscriber:
        held: list[PromptBlocks] = []
        for first in (10, 20):
            with contextlib.closing(EventPublisher(config(tmp_path, replay=False))) as publisher:
                prompt, number = PromptBlocks([first] * 5), 0
                async with timeout(60):
                    while subscriber.index.num_tokens(prompt) == 0:
                        store(publisher, first)
                        number += 1
                        await asyncio.sleep(0.02)
                held.append(prompt)
        assert [subscriber.index.num_tokens(prompt) for prompt in held] == [0, 4]


async def test_a_flood_of_batches_leaves_time_for_others(tmp_path: Path) -> None:
    """A receive of pyzmq completes at once while a message is there."""
    settings, empty, num, turns = config(tmp_path, replay=False), encode_batch(EventBatch(1.0, [])), 2000, 0
    with contextlib.closing(zmq.Context.instance().socket(zmq.PUB)) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.bind(settings.endpoint)
        async with reading(settings) as subscriber, timeout(60):
            while subscriber.sequence.expected is None:
                socket.send_multipart([b"", bytes(8), empty])
                await asyncio.sleep(0.005)
            for number in range(1, num):
                socket.send_multipart([b"", number.to_bytes(8, "big"), empty])
            while subscriber.sequence.expected < num:
                turns += 1
                await asyncio.sleep(0)
    assert turns >= num - 10


@pytest.mark.parametrize("number", [-1, -(1 << 63), (1 << 63) - 1])
async def test_a_reader_outlives_any_number_and_time(tmp_path: Path, number: int) -> None:
    """Numbers of which no next one exists, and times that no later one exceeds, count as malformed."""
    settings = config(tmp_path)
    context = zmq.Context.instance()
    with (
        contextlib.closing(context.socket(zmq.PUB)) as socket,
        contextlib.closing(
            EventPublisher(msgspec.structs.replace(settings, endpoint=f"ipc://{tmp_path}/other"))
        ) as real,
    ):
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(settings.endpoint)
        prompt = store(real, 5)
        await until_sent(real, 1)
        async with reading(settings) as subscriber, timeout(60):
            await until_held(subscriber, prompt)
            for ts in (1.0, math.nan, math.inf):
                before = subscriber.num_malformed
                while subscriber.num_malformed == before:
                    frames = [b"", number.to_bytes(8, "big", signed=True), encode_batch(EventBatch(ts, []))]
                    socket.send_multipart(frames)
                    await asyncio.sleep(0.005)
            assert (subscriber.sequence.expected, subscriber.sequence.num_gaps) == (1, 0)
            assert subscriber.index.num_tokens(prompt) == 4


async def test_nothing_but_events_is_believed(tmp_path: Path) -> None:
    settings = config(tmp_path, replay=False)
    context = zmq.asyncio.Context.instance()
    with contextlib.closing(context.socket(zmq.PUB)) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(settings.endpoint)
        async with reading(settings) as subscriber:
            bad = [[b"x"], [b"", b"short", b""], [b"", bytes(8), b"\xc1"], [b"", bytes(8), b"\x93\x00"], [b""] * 5]
            async with timeout(60):
                while subscriber.num_malformed < 20:
                    for frames in bad:
                        await socket.send_multipart(frames)
                    await asyncio.sleep(0.01)
            assert (subscriber.index.num_blocks, subscriber.sequence.expected) == (0, None)


@pytest.mark.parametrize("start", [0, 2])
async def test_replays_are_as_vllm_answers_them(tmp_path: Path, start: int) -> None:
    """Frames: empty, topic, sequence, payload; the end marker has an empty topic, -1 and nothing."""
    with contextlib.closing(EventPublisher(config(tmp_path))) as publisher:
        for number in range(3):
            store(publisher, number)
            await until_sent(publisher, number + 1)
        context = zmq.asyncio.Context.instance()
        with contextlib.closing(context.socket(zmq.DEALER)) as socket:
            socket.connect(f"ipc://{tmp_path}/replay")
            for malformed in ([b"x"], [b"", b"short"], [b"x", bytes(8)]):
                await socket.send_multipart(malformed)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            answers = [await asyncio.wait_for(socket.recv_multipart(), 60) for _ in range(4 - start)]
        assert answers[-1] == [b"", b"", END_SEQUENCE, b""]
        for number, (empty, topic, sequence, payload) in enumerate(answers[:-1], start):
            assert (empty, topic, int.from_bytes(sequence, "big")) == (b"", b"kv@pod@model", number)
            (event,) = decode_batch(payload).events
            assert isinstance(event, BlockStored)
            assert event.token_ids == [number] * 4
