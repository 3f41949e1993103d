"""What every transport is: registered regions, peers, and one-sided copies between them.

A transport moves bytes and knows nothing of requests, groups or tokens. Its user names memory by (region
index, offset) and gets an `Operation` per copy list. The rules that the conformance suite
(`baton.testing.check_transport`) holds every transport to:

- `done` means visible to every reader at the destination, not merely posted. What is sent after it, on any
  channel, cannot overtake the data.
- After `cancel` returned "quiet" nothing of that operation is read or written any more. "unknown" proves
  nothing: its pages may be reused only once the peer is fenced.
- Every run is checked against both regions before the first byte moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.errors import ProtocolError, TransportError
from baton.kv.geometry import CopyList

__all__ = [
    "ByteArray",
    "CopyList",
    "DeviceMemory",
    "Direction",
    "Operation",
    "Peer",
    "Region",
    "Transport",
    "check_copies",
    "check_regions",
]

ByteArray = NDArray[np.uint8]
Direction = Literal["read", "write"]
State = Literal["pending", "done", "failed"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`nbytes` of CUDA device number `device` at `address`, which stay allocated as long as they are registered.

    `enter` gives the thread that calls it the device's context.
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

    __slots__ = ("_ended", "_error", "_lock", "_state", "flags", "tag")

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.flags = np.zeros(2, dtype=np.int64)
        self._state: State = "pending"
        self._error: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def poll(self) -> State:
        """The state now; never blocks."""
        return self._state

    @property
    def error(self) -> str | None:
        """Why it failed; None while pending and when done."""
        return self._error

    def wait(self, timeout: float | None = None) -> State:
        """Block until it ended or `timeout` seconds passed, and return the state."""
        self._ended.wait(timeout)
        return self._state

    def end(self, error: str | None = None) -> None:
        """For transports: end as done, or as failed with `error`. The first end counts."""
        with self._lock:
            if self._state == "pending":
                self._error = error
                self._state = "done" if error is None else "failed"
                self._ended.set()


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
        """True only when it is proven that the peer can no longer touch this side's memory."""
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
        """Open `regions` to peers, once, and return the descriptor that `connect` takes. The order is the
        index. All are memory of the host, or all of one device.

        Raises `TransportError` for memory that the transport cannot open, or at a second call.
        """
        ...

    def connect(self, descriptor: bytes) -> Peer:
        """Reach the peer that registered `descriptor`.

        Raises `ProtocolError` for a malformed descriptor, `TransportError` when the peer cannot be reached.
        """
        ...

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        """Start copying: "write" from own regions to the peer's, "read" from the peer's to own.

        May block the caller for a short time. The arrays of `copies` must not be changed while it is pending.

        Raises `ProtocolError` for a run outside a region, `TransportError` when either side is closed.
        """
        ...

    def cancel(self, operation: Operation) -> Literal["quiet", "unknown"]:
        """Stop an operation. An operation that has ended is "quiet". What is copied so far stays copied."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Stop the peer's operations, which then end as failed, and let go of its memory. Idempotent."""
        ...

    def close(self) -> None:
        """Stop everything and release all memory. Idempotent."""
        ...


def check_regions(regions: Sequence[Region]) -> list[ByteArray]:
    """The regions, if all are memory of the host that can be opened to peers. Raises `TransportError`."""
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
    """Raise `ProtocolError` unless every run lies inside its region on both sides. A few numpy passes."""
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
