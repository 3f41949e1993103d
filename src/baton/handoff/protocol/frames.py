"""Encodes and decodes control messages (docs/protocol.md, "Channel").

Anything unknown, too long or of the wrong shape raises `ProtocolError`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import ProtocolError
from baton.handoff.plan.tables import join_tables, share_tables
from baton.handoff.protocol.messages import (
    MAX_DRAFTER_STATES,
    Ack,
    Admitted,
    Announce,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    Confirm,
    ControlMessage,
    Finished,
    Hello,
    Nack,
    Progress,
    ReadDone,
    Ready,
    Register,
    Renew,
    Repair,
)

PROTOCOL_VERSION = 8

_SMALL = 8 * 1024
_SEEDS = MAX_DRAFTER_STATES + 64 * 1024
MAX_TABLES_BYTES = 8 * 1024 * 1024
_LIMITS: dict[type[ControlMessage], int] = {
    Hello: 1024 * 1024,
    Bye: _SMALL,
    Renew: 256,
    Announce: 32 * 1024,
    Admitted: _SMALL,
    Register: MAX_TABLES_BYTES,
    Ready: MAX_TABLES_BYTES,
    ReadDone: _SMALL,
    Confirm: _SEEDS,
    Progress: MAX_TABLES_BYTES,
    Commit: MAX_TABLES_BYTES,
    Repair: 256 * 1024,
    Finished: _SEEDS,
    Ack: _SMALL,
    Nack: _SMALL,
    Cancel: _SMALL,
    Cancelled: _SMALL,
}


def kind_of(message: ControlMessage | type[ControlMessage]) -> str:
    """Name on the wire, such as `"REGISTER"`."""
    return str(message.__struct_config__.tag)


# One decoder per concrete type, so a body of another kind is a shape error.
DECODERS: dict[str, tuple[msgspec.msgpack.Decoder[Any], int]] = {
    kind_of(cls): (msgspec.msgpack.Decoder(cls), limit) for cls, limit in _LIMITS.items()
}
# 256: room for the envelope.
MAX_FRAME = max(_LIMITS.values()) + 256


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame. `session`: number of the connection. `sequence`: position in that session."""

    version: int
    session: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    sequence: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    kind: Annotated[str, Meta(max_length=32)]
    body: msgspec.Raw


_envelope = msgspec.msgpack.Decoder(Envelope)
_encoder = msgspec.msgpack.Encoder()
# ValueError: text that is not UTF-8. ProtocolError: an invalid interval. msgspec wraps neither.
_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError, ProtocolError)
M = TypeVar("M", bound=ControlMessage)


def _with_shared_tables(message: ControlMessage) -> ControlMessage:
    if not isinstance(message, Register | Ready):
        return message
    pages, same = share_tables(message.pages)
    return msgspec.structs.replace(message, pages=pages, same=same)


def _with_joined_tables(message: ControlMessage) -> ControlMessage:
    """Raises `ProtocolError`."""
    if not isinstance(message, Register | Ready) or not message.same:
        return message
    return msgspec.structs.replace(message, pages=join_tables(message.pages, message.same), same={})


def other_version(frame: bytes) -> int | None:
    """A frame's version; None if it is ours, or unreadable."""
    try:
        version = _envelope.decode(frame).version
    except _MALFORMED:
        return None
    return None if version == PROTOCOL_VERSION else version


def encode_frame(message: ControlMessage, session: int, sequence: int) -> bytes:
    """Raises `ProtocolError` for a message over its size limit."""
    kind = kind_of(message)
    body = _encoder.encode(_with_shared_tables(message))
    if len(body) > DECODERS[kind][1]:
        raise ProtocolError(f"{kind} of {len(body)} bytes is over its limit of {DECODERS[kind][1]}")
    return _encoder.encode(Envelope(PROTOCOL_VERSION, session, sequence, kind, msgspec.Raw(body)))


def decode_frame(frame: bytes) -> tuple[int, int, ControlMessage]:
    """Returns `(session, sequence, message)`. Raises `ProtocolError`."""
    if len(frame) > MAX_FRAME:
        raise ProtocolError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME}")
    try:
        envelope = _envelope.decode(frame)
    except _MALFORMED as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    if envelope.version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {envelope.version} is not supported (here {PROTOCOL_VERSION})")
    if envelope.kind not in DECODERS:
        raise ProtocolError(f"unknown message kind {envelope.kind!r}")
    decoder, limit = DECODERS[envelope.kind]
    body = bytes(envelope.body)
    if len(body) > limit:
        raise ProtocolError(f"{envelope.kind} of {len(body)} bytes is over its limit of {limit}")
    try:
        message = _with_joined_tables(decoder.decode(body))
    except _MALFORMED as error:
        raise ProtocolError(f"malformed {envelope.kind}: {error}") from error
    return envelope.session, envelope.sequence, message
