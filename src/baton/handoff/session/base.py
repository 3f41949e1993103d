"""The agent's view of sockets and worker threads, which a simulator can replace."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.handoff.protocol.messages import CHALLENGE_BYTES, ControlMessage


@dataclass(slots=True, eq=False)
class Connection:
    """One session."""

    session: int
    socket: Any  # None if no file descriptor was left for one
    identity: bytes | None = None  # set if the peer dialled us
    address: str = ""  # set if we dialled
    sent: int = 0
    received: int = 0
    engine: str | None = None  # the engine id that the peer's key belongs to; None without keys
    proven: bool = False  # The peer knows the ticket key, so it is not closed to make room for a stranger.
    # What the peer's proof is over.
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    key: bytes = b""  # seals the frames after the proof


class ControlChannel(Protocol):
    """What the agent uses of `baton.handoff.session.sockets.Channel`."""

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
        """Have the agent's thread poll soon. Any thread; never blocks."""
        ...


class Worker(Protocol):
    def start(self, job: Callable[[], None]) -> None:
        """Run `job` after earlier jobs. Never blocks."""
        ...
