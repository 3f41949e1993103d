"""The time and the sockets that the handoff's runner sees, so that a simulator can stand in for both."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.handoff.protocol.messages import CHALLENGE_BYTES, Message


class Clock(Protocol):
    """A process's clock. The time of day matters to no handoff."""

    def monotonic(self) -> float:
        """Seconds; never goes back. Of no meaning to another process, unless it has read it there."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(slots=True, eq=False)
class Connection:
    """One session. `identity` is set where the peer dialled us, `address` where we dialled.

    `socket` is None where we dialled and had no descriptor for one yet. `engine` is the engine id that the peer's key
    belongs to, None without keys. `proven`: the peer has proven that it knows the ticket key, so that it is not closed
    to make room for a stranger. `challenge` is what it proves it by; `key` seals the frames from then on.
    """

    session: int
    socket: Any
    identity: bytes | None = None
    address: str = ""
    sent: int = 0
    received: int = 0
    engine: str | None = None
    proven: bool = False
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    key: bytes = b""


class ControlChannel(Protocol):
    """What the runner needs of `baton.handoff.channel.sockets.Channel`."""

    @property
    def address(self) -> str:
        """Where this engine is dialled."""
        ...

    @property
    def malformed(self) -> int:
        """Frames that were dropped because they could not be read."""
        ...

    def dial(self, address: str) -> Connection:
        """Open a session. Raises `ProtocolError` for an address that cannot be dialled."""
        ...

    def drop(self, connection: Connection) -> None:
        """Forget a session."""
        ...

    def send(self, connection: Connection, message: Message) -> None:
        """Send or lose, never block. Raises `ProtocolError` for a message over its size limit."""
        ...

    def wake(self) -> None:
        """Have the runner polled soon: something that it waited for has ended. Any thread; never blocks."""
        ...


class Worker(Protocol):
    """Takes work off the runner's thread."""

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` some time soon, after those before it. Never blocks."""
        ...
