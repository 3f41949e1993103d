"""The agent's view of sockets and worker threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from baton.handoff.protocol.messages import CHALLENGE_BYTES, ControlMessage


@dataclass(slots=True, eq=False)
class Connection:
    """One control connection. `session`: its number in frames. `sent`, `received`: the last sequence numbers."""

    session: int
    socket: Any  # None if no file descriptor was left for one
    identity: bytes | None = None  # set if the peer dialled us
    address: str = ""  # set if we dialled
    sent: int = 0
    received: int = 0
    engine: str | None = None  # the engine id of the peer's key; None without keys
    proven: bool = False  # the peer knows the ticket key, so unproven peers do not evict it
    # What the peer's proof covers.
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    key: bytes = b""  # seals the frames after the proof


@dataclass(frozen=True, slots=True)
class NoSession:
    """No session begins with who is at a dialled address."""

    reason: Literal["unreachable_peer", "incompatible_peer"]
    text: str


def unanswered(address: str) -> NoSession:
    text = f"no answer from {address}: nobody is there, or it has another ticket key, or not these keys"
    return NoSession("unreachable_peer", text)


class ControlChannel(Protocol):
    """The control sockets of one rank. Not thread-safe, except `wake` and `malformed`, the number of frames
    that could not be decoded. `address`: where peers dial it."""

    @property
    def address(self) -> str: ...

    @property
    def malformed(self) -> int: ...

    def dial(self, address: str) -> Connection:
        """Open a session. Raises `ProtocolError` for an address that cannot be dialled."""
        ...

    def drop(self, connection: Connection) -> None: ...

    def send(self, connection: Connection, message: ControlMessage) -> None:
        """Send or drop; never block. Raises `ProtocolError` for a message over its size limit."""
        ...

    def wake(self) -> None:
        """Make the agent's thread poll soon. Thread-safe; never blocks."""
        ...


class Worker(Protocol):
    """Runs jobs on another thread, in order."""

    def start(self, job: Callable[[], None]) -> None:
        """Never blocks."""
        ...
