"""Reads the KV events of one engine into its index. Gaps are replayed; if that fails, the index is cleared."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math

import zmq
import zmq.asyncio

from baton.errors import ProtocolError
from baton.event_loop import timeout
from baton.kvevents.messages import (
    END_SEQUENCE,
    MAX_BATCH_BYTES,
    SEQUENCE_BYTES,
    BlockStored,
    EventBatch,
    decode_batch,
)
from baton.log_limit import LogLimit
from baton.router.index.blocks import BlockIndex

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_MAX_NUMBER = (1 << 63) - 1
_REPLAY_S = 2.0
# Waiting batches (of up to `MAX_BATCH_BYTES`) while the router is busy. Later ones wait at the engine.
_HWM = 16
# Seconds until the next attempt after an error of a socket.
_AGAIN_S = 1.0
# Applying a batch takes 2 us per block.
_MAX_BLOCKS, _LONG_S = 1 << 17, 0.005


class BatchOrder:
    """Orders batches. `expected`: the next sequence number; None before the first."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.expected: int | None = None
        self._last_ts = 0.0
        self.num_gaps = self.num_restarts = 0

    def is_gap(self, number: int) -> bool:
        """Whether batches before this one are missing. A first batch other than 0 is a gap too."""
        return number > (0 if self.expected is None else self.expected)

    def lost(self, number: int) -> None:
        """The batches before `number` are unavailable: the index may be wrong."""
        self.num_gaps += 1
        self._index.clear()
        self.expected = number

    def restart(self) -> None:
        self._index.clear()
        self.expected, self._last_ts = None, 0.0

    def note_start(self, number: int, batch: EventBatch) -> None:
        """Begin again if a later batch repeats a number: the engine has restarted."""
        if self.expected is not None and number < self.expected and batch.ts > self._last_ts:
            self.num_restarts += 1
            self.restart()

    def follow(self, number: int, batch: EventBatch) -> None:
        if self.expected is not None and number < self.expected:
            return
        self._index.apply(*batch.events)
        self.expected, self._last_ts = number + 1, batch.ts


class EventSubscriber:
    """Follows one engine while `run` runs. `rank`: the data-parallel rank whose events count; None: all.

    `endpoint`, `replay_endpoint`: tcp:// or ipc:// addresses, from the operator or derived from the engine's URL.
    """

    def __init__(
        self, index: BlockIndex, endpoint: str, replay_endpoint: str | None = None, rank: int | None = None
    ) -> None:
        self.index, self._rank = index, rank
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self.sequence = BatchOrder(index)
        self.num_malformed = 0

    async def run(self) -> None:
        """Until it is cancelled: no error ends it."""
        while True:
            try:
                await self._follow()
            except Exception:  # a reader that ended would leave a stale index
                logger.exception("%s: KV events are read anew", self._endpoint)
                self.sequence.restart()
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        context = zmq.asyncio.Context.instance()
        with contextlib.closing(context.socket(zmq.SUB)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.set_hwm(_HWM)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            if self._replay_endpoint is not None:
                await self._replay(0)  # published before
            while True:
                frames, clock = await socket.recv_multipart(), asyncio.get_running_loop().time
                began = clock()
                await self._take(frames)
                # A receive does not yield while batches are there; a flood gets half of the loop's time.
                await asyncio.sleep(busy_s if (busy_s := clock() - began) > _LONG_S else 0)

    async def _take(self, frames: list[bytes]) -> None:
        read = self._read(frames[-2:]) if len(frames) in (2, 3) else None
        if read is None:
            self.num_malformed += 1
            return
        number, batch = read
        self.sequence.note_start(number, batch)
        if self.sequence.is_gap(number):
            if self._replay_endpoint is not None:
                await self._replay(self.sequence.expected or 0)
            if self.sequence.is_gap(number):
                self.sequence.lost(number)
        self.sequence.follow(number, batch)

    def _read(self, frames: list[bytes]) -> tuple[int, EventBatch] | None:
        if len(frames[0]) != SEQUENCE_BYTES:
            return None
        try:
            batch = decode_batch(frames[1])
        except ProtocolError as error:
            logger.warning("%s: %s", self._endpoint, error)
            return None
        if self._rank is not None and batch.data_parallel_rank not in (None, self._rank):
            batch = EventBatch(batch.ts, [], batch.data_parallel_rank)
        number = int.from_bytes(frames[0], "big", signed=True)
        num_blocks = sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
        is_sane = 0 <= number < _MAX_NUMBER and math.isfinite(batch.ts) and num_blocks <= _MAX_BLOCKS
        return (number, batch) if is_sane else None

    async def _replay(self, start: int) -> None:
        """Request the batches from `start` on, and apply those that come."""
        context = zmq.asyncio.Context.instance()
        with contextlib.closing(context.socket(zmq.DEALER)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.connect(self._replay_endpoint or "")
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(_REPLAY_S):
                    await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big", signed=True)])
                    while True:
                        frames = await socket.recv_multipart()
                        await asyncio.sleep(0)
                        # SGLang omits the topic.
                        if len(frames) < 3 or frames[-2] == END_SEQUENCE:
                            return
                        read = self._read(frames[-2:])
                        if read is None:
                            self.num_malformed += 1
                            return
                        number, batch = read
                        if self.sequence.is_gap(number):
                            self.sequence.lost(number)
                        self.sequence.follow(number, batch)
