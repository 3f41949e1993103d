"""How engines prove to each other in HELLO that they are of one deployment: they know its ticket key.

A proof is an HMAC-SHA256 under that key over the HELLO itself, the challenge that the other side drew for this
connection, the address that was dialled, and who of the two dialled. So a HELLO that was overheard proves nothing in
another connection, neither side can be made to speak for the other, and a proof meant for one engine is of no use at
another. From then on each frame is sealed by a key of that session: a socket that loses its connection dials again by
itself, and somebody else may listen at the address by then.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from baton.handoff.protocol.messages import Hello

# Separates this use of the ticket key from its others.
_CONTEXT = b"baton-hello-1\0"
_SESSION = b"baton-session-1\0"
Side = Literal["dialled", "answered"]

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def prove(key: bytes, side: Side, address: str, challenge: bytes, hello: Hello) -> Hello:
    """`hello` with the proof of who says it. `challenge` is the other side's, `address` the one that was dialled."""
    return msgspec.structs.replace(hello, proof=_proof(key, side, address, challenge, hello))


def is_proven(key: bytes, side: Side, address: str, challenge: bytes, hello: Hello) -> bool:
    """Whether the sender of `hello`, which stands on `side` of the connection, knows the key."""
    return hmac.compare_digest(hello.proof, _proof(key, side, address, challenge, hello))


def session_key(key: bytes, dialler: bytes, listener: bytes) -> bytes:
    """What seals the frames of one session, from the challenges of who dialled and of who listens."""
    return hmac.new(key, _SESSION + dialler + listener, hashlib.sha256).digest()


def seal(key: bytes, side: Side, frame: bytes) -> bytes:
    """The mark of a frame that `side` sends: 16 bytes."""
    return hmac.new(key, side.encode() + frame, hashlib.sha256).digest()[:16]


def is_sealed(key: bytes, side: Side, frame: bytes, mark: bytes) -> bool:
    """Whether the mark is that of the frame, which `side` has sent."""
    return hmac.compare_digest(mark, seal(key, side, frame))


def _proof(key: bytes, side: Side, address: str, challenge: bytes, hello: Hello) -> bytes:
    said = (side, address, challenge, msgspec.structs.replace(hello, proof=b""))
    return hmac.new(key, _CONTEXT + _encoder.encode(said), hashlib.sha256).digest()
