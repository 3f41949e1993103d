"""Publishes an engine's KV events over ZeroMQ as vLLM does: a PUB socket, and a ROUTER socket that repeats batches.

A message has the frames topic, sequence (8 bytes, big-endian, from 0) and payload. A replay is requested with its first
sequence, answered in the same frames, and ended by sequence -1 with an empty payload.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from baton.errors import ConfigError
from baton.kv.cache import KVCache
from baton.kv.spec import GroupSpec
from baton.kv.state_pool import StatePool
from baton.kvevents.config import KVEventsConfig
from baton.kvevents.messages import END_SEQUENCE, SEQUENCE_BYTES, EventBatch, encode_batch
from baton.kvevents.recorder import EventRecorder, RecordedGroup
from baton.log_limit import LogLimit
from baton.zeromq import begin_ids_at_random

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

# vLLM's names of the kinds.
_KINDS = {
    "full": "full_attention",
    "sliding_window": "sliding_window",
    "mla": "mla_attention",
    "compressed": "mla_attention",
    "state": "mamba",
}
_LINGER_MS = 200
_MAX_ASK_BYTES = 4096
# For one batch: an engine step enters the blocks of many requests.
_GATHER_S = 0.002


class EventPublisher:
    """Publishes what `recorder` records. `rank`: the engine's data-parallel rank. `port`, `replay_port`: 0 without a
    socket.

    Raises `ConfigError`.
    """

    def __init__(self, config: KVEventsConfig, rank: int | None = None) -> None:
        own = config.of_rank(rank or 0)
        self._rank, self._topic = rank, own.topic.encode()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self.recorder = EventRecorder(own.max_queue_size, self._signal)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=own.buffer_steps)
        self._sequence = 0
        begin_ids_at_random()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(own.hwm)
        self._replay = None if own.replay_endpoint is None else self._context.socket(zmq.ROUTER)
        for listening in filter(None, (self._pub, self._replay)):
            listening.setsockopt(zmq.MAXMSGSIZE, _MAX_ASK_BYTES)
        self.port = self.replay_port = 0
        try:
            self.port = _bind(self._pub, own.endpoint, "endpoint")
            if self._replay is not None and own.replay_endpoint is not None:
                self.replay_port = _bind(self._replay, own.replay_endpoint, "replay_endpoint")
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def watch(self, cache: KVCache, groups: Sequence[GroupSpec]) -> None:
        for index, group in enumerate(groups):
            pool = cache.pools[group.name]
            size = pool.step if isinstance(pool, StatePool) else pool.page_size
            recorded = RecordedGroup(index, _KINDS[group.kind], group.window, size)
            pool.on_stored = functools.partial(self.recorder.stored, recorded)
            pool.on_removed = functools.partial(self.recorder.removed, recorded)

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._stopping = True
        self._signal()
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                time.sleep(_GATHER_S)
                self._publish()

    def _publish(self) -> None:
        events = self.recorder.take()
        if not events:
            return
        payload = encode_batch(EventBatch(time.time(), events, self._rank))
        self._buffer.append((self._sequence, payload))
        self._pub.send_multipart([self._topic, _frame(self._sequence), payload])
        self._sequence += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            logger.warning("a malformed request for KV events is ignored")
            return
        client, start = frames[0], int.from_bytes(frames[2], "big", signed=True)
        # A slow client loses only its own replay.
        with contextlib.suppress(zmq.ZMQError):
            for sequence, payload in self._buffer:
                if sequence >= start:
                    parts = [client, b"", self._topic, _frame(sequence), payload]
                    replay.send_multipart(parts, flags=zmq.NOBLOCK)
            replay.send_multipart([client, b"", b"", END_SEQUENCE, b""], flags=zmq.NOBLOCK)


def _frame(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def _bind(socket: zmq.Socket[bytes], endpoint: str, name: str) -> int:
    """Returns the port; 0 if none."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events_config.{name}", f"cannot be bound: {endpoint}: {error}") from None
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(bound.rpartition(":")[2]) if bound.startswith("tcp://") else 0
