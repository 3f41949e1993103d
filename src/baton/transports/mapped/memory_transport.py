"""The base of `local` and `shm`: the peer's memory is mapped, so a copy is a `memcpy`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.errors import TransportError
from baton.kv.geometry import CopyList
from baton.transports.base import (
    ByteArray,
    Direction,
    Operation,
    Peer,
    Region,
    check_copies,
    check_regions,
    future_of,
    source_and_dest,
)
from baton.transports.mapped.mover import Mover, copy_now

# Copied by the thread that submits them: another takes as long to wake.
DIRECT_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class MemoryPeer:
    """A peer whose regions are mapped. `disconnect` empties `regions`."""

    name: str
    regions: list[ByteArray]
    is_alive: Callable[[], bool]
    is_fenced: Callable[[], bool]
    is_dead: Callable[[], bool] = lambda: False
    on_disconnect: Callable[[], None] = lambda: None
    operations: list[Operation] = field(default_factory=list)
    connected: bool = True

    @property
    def region_sizes(self) -> list[int]:
        return [region.size for region in self.regions]

    def alive(self) -> bool:
        return self.connected and self.is_alive()

    def fenced(self) -> bool:
        return self.is_fenced()

    def dead(self) -> bool:
        return self.is_dead()


class MemoryTransport:
    """Subclasses allocate memory, describe it, and map a peer's."""

    scheme = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[ByteArray] | None = None
        self._peers: list[MemoryPeer] = []
        self._mover = Mover(f"baton-{self.scheme}")
        self._closed = False

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        raise NotImplementedError

    def _describe(self, regions: list[ByteArray]) -> bytes:
        """Raises `TransportError`."""
        raise NotImplementedError

    def _map(self, descriptor: bytes) -> MemoryPeer:
        """Raises `ProtocolError` or `TransportError` as `connect` does."""
        raise NotImplementedError

    def _release(self) -> None: ...
    def register(self, regions: Sequence[Region]) -> bytes:
        memory = check_regions(regions)
        with self._lock:
            self._need_open()
            if self._regions is not None:
                raise TransportError("regions are registered once per transport")
            descriptor = self._describe(memory)
            self._regions = memory
        return descriptor

    def connect(self, descriptor: bytes) -> Future[Peer]:
        """The future is done: mapping memory waits for no peer."""
        return future_of(lambda: self._connect(descriptor))

    def _connect(self, descriptor: bytes) -> MemoryPeer:
        with self._lock:
            self._need_open()
            peer = self._map(descriptor)
            self._peers.append(peer)
        return peer

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        with self._lock:
            self._need_open()
            if self._regions is None:
                raise TransportError("register own regions before copying")
            if not isinstance(peer, MemoryPeer) or peer not in self._peers:
                raise TransportError("not connected to this peer")
            if not peer.alive():
                raise TransportError(f"peer {peer.name} is gone")
            sources, dests = source_and_dest(direction, self._regions, peer.regions)
            check_copies(copies, [r.size for r in sources], [r.size for r in dests])
            operation = Operation(tag)
            peer.operations = [op for op in peer.operations if op.poll() == "pending"]
            peer.operations.append(operation)
            move = copy_now if copies.total <= DIRECT_BYTES else self._mover.submit
            move(sources[copies.source_region], dests[copies.dest_region], copies, operation)
        return operation

    def cancel(self, operation: Operation) -> None:
        """An operation that has begun ends with its chunk in flight."""
        operation.flags[0] = 1
        operation.withdraw("cancelled before it began")

    def disconnect(self, peer: Peer) -> None:
        if not isinstance(peer, MemoryPeer):
            raise TransportError("not a peer of this transport")
        with self._lock:
            peer.connected = False
            if peer in self._peers:
                self._peers.remove(peer)
            operations, peer.operations = peer.operations, []
        for operation in operations:
            self.cancel(operation)
        # The mover's thread unmaps the memory, since gigabytes take a while.
        regions, peer.regions = peer.regions, []
        if regions:
            self._mover.post(regions.clear)
        peer.on_disconnect()

    def close(self) -> None:
        """Own memory is released after the last copy: the release is the fence."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers)
        for peer in peers:
            self.disconnect(peer)
        self._mover.close()
        self._release()
        self._regions = None

    def _need_open(self) -> None:
        if self._closed:
            raise TransportError(f"the {self.scheme} transport is closed")
