"""The interface of a transport: registered regions, peers, and one-sided copies between them.

A transport moves bytes and knows nothing of requests, groups or tokens. Its user names memory by (region index,
offset) and gets one `Operation` per copy list. Every transport keeps these rules, which the conformance suite
(`baton.testing.check_transport`) tests:

- `done` means that every reader at the destination sees the bytes, not merely that the copy was posted. A message
  sent after `done`, on any channel, cannot overtake the data.
- An operation that has ended, done or failed, reads and writes nothing more. The pages of a pending operation may be
  reused only once the peer is fenced.
- Every run is checked against both regions before the first byte moves.
- No call waits for a peer. `connect`, `cancel` and `disconnect` return at once, and the work that they begin reports
  its end by a future or a callback; `alive` and `fenced` are flags. So one thread can serve many peers, even when one
  of them hangs.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.errors import BatonError, ProtocolError, TransportError
from baton.kv.geometry import CopyList

ByteArray = NDArray[np.uint8]
Direction = Literal["read", "write"]
CopyState = Literal["pending", "done", "failed"]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`nbytes` bytes at `address` on CUDA device number `device`; they stay allocated while they are registered.

    `enter` makes the device's context current on the calling thread.
    """

    address: int
    nbytes: int
    device: int
    enter: Callable[[], None] = field(compare=False)


Region = ByteArray | DeviceMemory


class Operation:
    """One submitted copy list. Thread-safe; ends exactly once, as done or failed.

    `flags` is an int64 array `[2]` shared with the mover: a non-zero first entry asks it to stop, the second
    counts the runs that are copied.
    """

    __slots__ = ("_callbacks", "_ended", "_error", "_lock", "_started", "_state", "flags", "tag")

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.flags = np.zeros(2, dtype=np.int64)
        self._state: CopyState = "pending"
        self._error: str | None = None
        self._started = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def poll(self) -> CopyState:
        """The state now; never blocks."""
        return self._state

    @property
    def error(self) -> str | None:
        """Why it failed; None while pending and when done."""
        return self._error

    def wait(self, timeout: float | None = None) -> CopyState:
        """Block until it ended or `timeout` seconds passed, and return the state."""
        self._ended.wait(timeout)
        return self._state

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when it ends, on the thread that ends it, or at once if it has ended.

        It must neither block nor raise.
        """
        with self._lock:
            if self._state == "pending":
                self._callbacks.append(callback)
                return
        callback()

    def start(self) -> bool:
        """For transports: mark that the first byte is about to move. False when the operation has ended already."""
        with self._lock:
            self._started = True
            return self._state == "pending"

    def withdraw(self, error: str) -> None:
        """For transports: end as failed with `error`, unless the copy has been started."""
        self._end(error, unless_started=True)

    def end(self, error: str | None = None) -> None:
        """For transports: end as done, or as failed with `error`. The first end counts."""
        self._end(error)

    def _end(self, error: str | None, unless_started: bool = False) -> None:
        with self._lock:
            # Looked at and ended in one turn: else a copy could start in between, and move bytes after its end.
            if self._state != "pending" or (unless_started and self._started):
                return
            self._error = error
            self._state = "done" if error is None else "failed"
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Peer(Protocol):
    """The other side of a connection."""

    @property
    def region_sizes(self) -> Sequence[int]:
        """Bytes of each region that the peer registered."""
        ...

    def alive(self) -> bool:
        """False once the peer has closed its transport or died."""
        ...

    def fenced(self) -> bool:
        """True only when it is proven that the peer can no longer touch this side's memory. Never blocks: where the
        proof takes work, the first call starts that work, and a later call returns True.
        """
        ...

    def dead(self) -> bool:
        """True only when it is proven that the peer's process is dead: nothing of it waits for a word any more. Never
        blocks.
        """
        ...


class Transport(Protocol):
    """One side's end of all its connections. Methods may be called from any thread."""

    @property
    def scheme(self) -> str:
        """The URI scheme it is chosen by."""
        ...

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        """Zeroed memory `[nbytes]` uint8 that can be registered. `name` is for humans.

        Raises `TransportError` when the host has not that much.
        """
        ...

    def register(self, regions: Sequence[Region]) -> bytes:
        """Open `regions` to peers, once, and return the descriptor that a peer's `connect` takes. A region's index is
        its position. All regions lie in the host's memory, or all on one device.

        Raises `TransportError` for memory that the transport cannot open, or at a second call.
        """
        ...

    def connect(self, descriptor: bytes) -> Future[Peer]:
        """Begin to reach the peer that registered `descriptor`; returns at once.

        The future ends, after some seconds at most, with the peer, with `ProtocolError` for a malformed descriptor, or
        with `TransportError` when the peer cannot be reached. It cannot be cancelled: a caller that no longer wants the
        peer disconnects it when the future ends.
        """
        ...

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        """Start to copy: "write" from own regions to the peer's, "read" from the peer's regions to own.

        `tag` names the operation in logs. The caller must not change the arrays of `copies` while the operation is
        pending.

        Raises `ProtocolError` for a run outside a region, `TransportError` when either side is closed.
        """
        ...

    def cancel(self, operation: Operation) -> None:
        """Ask an operation to end, and return at once. It ends when none of its bytes is under way any more; with a
        peer that hangs, that may be never. Bytes that were copied stay copied.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Refuse further copies for the peer, and return at once. Its operations end as failed when none of their
        bytes is under way; the transport then releases the peer's memory. Idempotent.
        """
        ...

    def close(self) -> None:
        """End all operations and release all memory. Waits for copies under way, some seconds at most. Idempotent."""
        ...


def future_of(make: Callable[[], Peer]) -> Future[Peer]:
    """For transports that connect without waiting: a future that already holds what `make` returned or raised."""
    future: Future[Peer] = Future()
    settle(future, make)
    return future


def settle(future: Future[Peer], make: Callable[[], Peer]) -> None:
    """For transports: give `future` what `make` returns or raises, other errors than Baton's as `TransportError`."""
    try:
        peer = make()
    except BatonError as error:
        future.set_exception(error)
    except Exception as error:
        cause = TransportError(f"cannot connect: {error}")
        cause.__cause__ = error
        future.set_exception(cause)
    else:
        future.set_result(peer)


def check_regions(regions: Sequence[Region]) -> list[ByteArray]:
    """Return the regions as arrays. Raises `TransportError` unless each is a flat, writable uint8 array of the host."""
    checked = []
    for region in regions:
        if isinstance(region, DeviceMemory):
            raise TransportError(f"this transport opens the host's memory, not that of device {region.device}")
        flat = region.dtype == "uint8" and region.ndim == 1 and region.flags.c_contiguous
        if not flat or not region.flags.writeable or region.size == 0:
            raise TransportError("a region is a flat, contiguous, writable, non-empty uint8 array")
        checked.append(region)
    return checked


def check_copies(copies: CopyList, source_sizes: Sequence[int], dest_sizes: Sequence[int]) -> None:
    """Raise `ProtocolError` unless every run of `copies` lies inside its region on both sides. Sizes in bytes."""
    columns = (copies.source_offset, copies.dest_offset, copies.nbytes)
    for column in columns:
        if column.dtype != np.int64 or column.ndim != 1 or column.size != copies.nbytes.size:
            raise ProtocolError("a copy list is three int64 arrays of one length")
        if not column.flags.c_contiguous:
            raise ProtocolError("the arrays of a copy list must be contiguous")
    sides = (
        ("source", copies.source_region, source_sizes, copies.source_offset),
        ("destination", copies.dest_region, dest_sizes, copies.dest_offset),
    )
    for side, region, sizes, offset in sides:
        if not 0 <= region < len(sizes):
            raise ProtocolError(f"{side} region {region} is not one of {len(sizes)}")
        # Written as offset > size - nbytes, since offset + nbytes could overflow.
        bad = (copies.nbytes < 0) | (offset < 0) | (copies.nbytes > sizes[region])
        bad |= offset > sizes[region] - copies.nbytes
        if bool(bad.any()):
            run = int(np.argmax(bad))
            raise ProtocolError(
                f"run {run} ({int(copies.nbytes[run])} bytes at {int(offset[run])}) lies outside "
                f"{side} region {region} of {sizes[region]} bytes"
            )


_open: weakref.WeakSet[Transport] = weakref.WeakSet()


def source_and_dest(direction: Direction, own: R, far: R) -> tuple[R, R]:
    """Own regions and those of a peer, in the order in which bytes go. Raises `ProtocolError` for another direction."""
    if direction not in ("read", "write"):
        raise ProtocolError(f"direction must be read or write, got {direction!r}")
    return (own, far) if direction == "write" else (far, own)


def close_at_exit(transport: Transport) -> None:
    """For transports: have `transport` closed when the interpreter ends, if it lives until then."""
    _open.add(transport)


@atexit.register
def _close_all() -> None:
    for transport in list(_open):
        transport.close()
