"""The interface between `RemoteTransport` and a transfer library."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.errors import TransportError
from baton.transports.base import ByteArray, DeviceMemory, Direction
from baton.transports.batches import Job, Runs
from baton.transports.process import ProcessWatch
from baton.transports.remote.lifeline import Lifeline, Line


class BatchFailedError(TransportError):
    """None of the batch's bytes is outstanding."""


@dataclass(slots=True, eq=False)
class RemotePeer:
    """Peers with one endpoint share the library's connection to it.

    `regions`: (address, bytes), on CUDA device number `device`, or on the host if that is None. `broken`: why the
    driver gave up the connection. `cut`: closed by the library, so no byte passes any more. `prove` asks the driver to
    receive what a gone peer had sent, and then to set `taken_in`.
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
        return [nbytes for _, nbytes in self.regions]

    def alive(self) -> bool:
        """False also once a copy has broken the connection."""
        return self.connected and self.broken is None and self.line.open()

    def gone(self) -> bool:
        """The peer has closed cleanly, or its process is dead."""
        return self.line.said_bye or self.watch.dead()

    def fenced(self) -> bool:
        """The peer is gone, and all that it had sent has been received."""
        if not self.taken_in and self.gone():
            self.prove(self)
        return self.taken_in

    def dead(self) -> bool:
        return self.watch.dead()


class Library:
    """All calls are on the driver's thread."""

    scheme = ""
    polls = False  # bytes move only during calls, also at the receiver

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        """Load the library, and register `bounce`, the destination of test reads from new peers.

        Raises `ConfigError`.
        """
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        """Open host memory to peers. Returns the name of this endpoint, and the metadata for `add`."""
        raise NotImplementedError

    def register_device(self, memory: list[DeviceMemory]) -> tuple[str, bytes]:
        """`register` memory of one device; test reads from new peers still go to host memory.

        Raises `TransportError` if the library cannot.
        """
        raise TransportError(f"the {self.scheme} transport opens the host's memory, not that of a device")

    def add(self, endpoint: str, metadata: bytes) -> None:
        """Raises `ProtocolError`."""
        raise NotImplementedError

    def remove(self, endpoint: str) -> bool:
        """Cut the connection, which has no batch in flight; some may have failed. True if after that no byte of a
        failed batch enters or leaves this process's memory.
        """
        raise NotImplementedError

    def issue(self, peer: RemotePeer, direction: Direction, rows: Runs) -> Any:
        """Start a batch (int64 `[runs, 3]`, as in `Job`). Returns its handle."""
        raise NotImplementedError

    def check(self, handle: Any) -> bool:
        """True if a batch is done, which releases its handle.

        Raises `BatchFailedError` if no bytes are outstanding. After any other exception the driver gives up the
        connection.
        """
        raise NotImplementedError

    def ended(self, handle: Any) -> bool:
        """No call of this process works on the batch any more, done or failed."""
        return True

    def progress(self) -> None: ...
    def receive_rest(self) -> None:
        """Receive all that gone peers had sent."""
        raise NotImplementedError

    def on_frame(self, line: Line, frame: bytes) -> None:
        line.abort()
