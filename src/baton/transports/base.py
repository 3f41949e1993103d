"""The interface of a transport: registered regions, peers, and one-sided copies between them.

Memory is addressed by (region index, offset). Rules, which `baton.testing.check_transport` tests:

- `done` means that every reader at the destination sees the bytes. A message sent after `done`, on any channel, cannot
  overtake the data.
- An operation that has ended, done or failed, reads and writes nothing more. The pages of a pending operation may be
  reused only once the peer is fenced.
- Every run is checked against both regions before the first byte moves.
- No call waits for a peer.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import msgspec
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
    """Memory on CUDA device number `device`; stays allocated while it is registered. `enter` makes the device's context
    current on the calling thread."""

    address: int
    nbytes: int
    device: int
    enter: Callable[[], None] = field(compare=False)


Region = ByteArray | DeviceMemory


class Operation:
    """One submitted copy list. Thread-safe; ends exactly once, as done or failed.

    `flags`: int64 `[2]`, shared with the mover. A non-zero first entry asks it to stop; the second counts copied runs.
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
        return self._state

    @property
    def error(self) -> str | None:
        return self._error

    def wait(self, timeout: float | None = None) -> CopyState:
        self._ended.wait(timeout)
        return self._state

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the thread that ends the operation, or at once if it has ended. It must neither block nor
        raise."""
        with self._lock:
            if self._state == "pending":
                self._callbacks.append(callback)
                return
        callback()

    def start(self) -> bool:
        """For transports: the first byte is about to move. False if the operation has already ended."""
        with self._lock:
            self._started = True
            return self._state == "pending"

    def withdraw(self, error: str) -> None:
        """For transports: end as failed with `error`, unless the copy has started."""
        self._end(error, unless_started=True)

    def end(self, error: str | None = None) -> None:
        """For transports: end as done, or as failed with `error`. Only the first end counts."""
        self._end(error)

    def _end(self, error: str | None, unless_started: bool = False) -> None:
        with self._lock:
            # Otherwise a copy could start in between, and move bytes after its end.
            if self._state != "pending" or (unless_started and self._started):
                return
            self._error = error
            self._state = "done" if error is None else "failed"
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Peer(Protocol):
    """The other side of one connection. Flags never raise, and may be read on any thread."""

    @property
    def region_sizes(self) -> Sequence[int]:
        """In bytes."""
        ...

    def alive(self) -> bool:
        """False once the peer has closed its transport or died, or after `disconnect`."""
        ...

    def fenced(self) -> bool:
        """True only if the peer provably can no longer touch this side's memory. If the proof takes work, the first
        call starts it."""
        ...

    def dead(self) -> bool:
        """True only if the peer's process is provably dead."""
        ...


class TransportOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A URI's options; of this class there are none."""


class Transport(Protocol):
    """One side. Thread-safe."""

    @property
    def scheme(self) -> str: ...

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        """Zeroed memory `[nbytes]` uint8 that can be registered. `name` is for humans.

        Raises `TransportError`, also for 0 bytes.
        """
        ...

    def register(self, regions: Sequence[Region]) -> bytes:
        """Open `regions` to peers, and return the descriptor for a peer's `connect`. All are in host memory, or all on
        one device.

        Raises `TransportError`, also at a second call.
        """
        ...

    def connect(self, descriptor: bytes) -> Future[Peer]:
        """The future yields the peer within seconds, or raises `ProtocolError` for a malformed descriptor, or
        `TransportError` if the peer cannot be reached. It cannot be cancelled: disconnect an unwanted peer when the
        future is done."""
        ...

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        """Copy "write" from own regions to the peer's, or "read" from the peer's regions to own.

        `tag` names the operation in logs. The arrays of `copies` must not change while it is pending.

        Raises `ProtocolError` for a run outside a region, `TransportError` if either side is closed.
        """
        ...

    def cancel(self, operation: Operation) -> None:
        """Return at once. The operation ends when none of its bytes is in flight, perhaps never if the peer hangs.
        Copied bytes stay copied.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Refuse further copies for the peer, and return at once. Its operations end as failed when none of their
        bytes is in flight; the transport then releases the peer's memory. Idempotent."""
        ...

    def close(self) -> None:
        """Waits some seconds at most for copies in flight. Idempotent."""
        ...


def future_of(make: Callable[[], Peer]) -> Future[Peer]:
    """For transports that connect without waiting."""
    future: Future[Peer] = Future()
    finish_future(future, make)
    return future


def finish_future(future: Future[Peer], make: Callable[[], Peer]) -> None:
    """Complete `future` with `make()`. Errors other than Baton's become `TransportError`."""
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
    """Raises `TransportError`."""
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
    """Raises `ProtocolError` unless every run is inside its region on both sides. Sizes in bytes."""
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
        # Not offset + nbytes > size, which could overflow.
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
    if direction not in ("read", "write"):
        raise ProtocolError(f"direction must be read or write, got {direction!r}")
    return (own, far) if direction == "write" else (far, own)


def close_at_exit(transport: Transport) -> None:
    _open.add(transport)


@atexit.register
def _close_all() -> None:
    for transport in list(_open):
        transport.close()
