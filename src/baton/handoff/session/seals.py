"""Seals: once both peers are proven, each frame shows that one of them sent it."""

from __future__ import annotations

from baton.errors import ProtocolError
from baton.handoff.protocol.handshake import Side, is_sealed, seal
from baton.handoff.protocol.messages import Bye, ControlMessage, Hello
from baton.handoff.session.base import Connection


def seal_of(connection: Connection, frame: bytes) -> list[bytes]:
    """The part that follows a sent frame: its seal, or nothing before the peer is proven."""
    if not connection.key:
        return []
    return [seal(connection.key, "dialled" if connection.identity is None else "answered", frame)]


def check_seal(
    connection: Connection, side: Side, message: ControlMessage, frame: bytes, mark: list[bytes]
) -> ControlMessage:
    """Raises `ProtocolError` unless the session's peer sealed the message or it needs no seal. A HELLO proves its
    sender by itself; BYE may come from an engine that does not know the session.
    """
    if not connection.key or (mark and is_sealed(connection.key, side, frame, mark[0])):
        return message
    if isinstance(message, Hello):
        return message
    if isinstance(message, Bye) and side == "answered":
        return Bye("unknown_session")
    raise ProtocolError("a frame of another than who opened the session")
