"""What a transfer library has to supply to become a transport, and what a peer is to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.errors import TransportError
from baton.transports.base import ByteArray, DeviceMemory, Direction
from baton.transports.batches import Job, Rows
from baton.transports.lifeline import Lifeline, Line
from baton.transports.process import ProcessWatch


class BatchFailedError(TransportError):
    """A batch ended with an error, and nothing of it is outstanding."""


@dataclass(slots=True, eq=False)
class RemotePeer:
    """A peer of a `RemoteTransport`. Peer objects of one endpoint share the library's connection to it.

    `device` is where its regions are, None on the host. `prove` has the driver take in what a peer that is gone had
    under way, and set `taken_in`; `broken` says why its connection was given up, `cut` that nothing goes over it to or
    from this process any more.
    """

    endpoint: str
    regions: list[tuple[int, int]]
    line: Line
    watch: ProcessWatch
    prove: Callable[[RemotePeer], None]
    jobs: deque[Job] = field(default_factory=deque)
    connected: bool = True
    broken: str | None = None
    cut: bool = False
    proving: bool = False
    taken_in: bool = False
    device: int | None = None

    @property
    def region_sizes(self) -> list[int]:
        """Bytes of each region."""
        return [nbytes for _, nbytes in self.regions]

    def alive(self) -> bool:
        """False once the peer closed or died, a copy broke the connection, or after `disconnect`."""
        return self.connected and self.broken is None and self.line.open()

    def gone(self) -> bool:
        """True once the peer has closed in order, or its process is known to be dead."""
        return self.line.said_bye or self.watch.dead()

    def fenced(self) -> bool:
        """True once the peer is gone and all that it had under way has been taken in."""
        if not self.taken_in and self.gone():
            self.prove(self)
        return self.taken_in


class Library:
    """Calls into a transfer library, all made on one thread, its driver's."""

    scheme = ""
    polls = False  # bytes move only while the library is called, at the receiver too

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        """Load the library, start its engine, and register `bounce`, where bytes read from new peers land.

        Raises `ConfigError` when the library or a part of it is missing.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """End the engine, and with it all that it registered."""
        raise NotImplementedError

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        """Open memory to peers; the name of this endpoint, and its metadata."""
        raise NotImplementedError

    def register_device(self, memory: list[DeviceMemory]) -> tuple[str, bytes]:
        """As `register`, for memory of one device; bytes read from new peers still land on the host.

        Raises `TransportError` when the library cannot.
        """
        raise TransportError(f"the {self.scheme} transport opens the host's memory, not that of a device")

    def add(self, endpoint: str, metadata: bytes) -> None:
        """Make an endpoint known. Raises `ProtocolError` for one that cannot be."""
        raise NotImplementedError

    def remove(self, endpoint: str) -> bool:
        """Cut the connection to an endpoint, on which no batch is under way, though some may have failed; True when
        nothing of those touches this process's memory, or leaves it, after that.
        """
        raise NotImplementedError

    def issue(self, peer: RemotePeer, direction: Direction, rows: Rows) -> Any:
        """Start a batch (`[runs, 3]`, as in `Job`) and return its handle."""
        raise NotImplementedError

    def check(self, handle: Any) -> bool:
        """True when a batch is done; it is released then.

        Raises `BatchFailedError`, or any other exception when more of it may be outstanding: that cuts the
        peer off.
        """
        raise NotImplementedError

    def ended(self, handle: Any) -> bool:
        """True when no call of this process works on a batch any more, whatever became of it."""
        return True

    def progress(self) -> None:
        """Let the library work, if it `polls`."""

    def take_in(self) -> None:
        """Return when what a peer that is gone had under way to this process has been taken in."""
        raise NotImplementedError

    def on_frame(self, line: Line, frame: bytes) -> None:
        """Take a frame of the library's own, if it sends any."""
        line.abort()
