"""How engines prove in HELLO that they know the deployment's ticket key, and seal the frames after it
(docs/protocol.md, "Secrets and digests").
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from baton.handoff.protocol.messages import Hello

_CONTEXT = b"baton-hello-1\0"
_SESSION = b"baton-session-1\0"
Side = Literal["dialled", "answered"]

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def prove(key: bytes, side: Side, address: str, challenge: bytes, hello: Hello) -> Hello:
    return msgspec.structs.replace(hello, proof=_proof(key, side, address, challenge, hello))


def is_proven(key: bytes, side: Side, address: str, challenge: bytes, hello: Hello) -> bool:
    """Whether the sender of `hello`, on `side`, knows the key."""
    return hmac.compare_digest(hello.proof, _proof(key, side, address, challenge, hello))


def session_key(key: bytes, dialler: bytes, listener: bytes) -> bytes:
    return hmac.new(key, _SESSION + dialler + listener, hashlib.sha256).digest()


def seal(key: bytes, side: Side, frame: bytes) -> bytes:
    """16 bytes. `side`: the sender's."""
    return hmac.new(key, side.encode() + frame, hashlib.sha256).digest()[:16]


def is_sealed(key: bytes, side: Side, frame: bytes, mark: bytes) -> bool:
    return hmac.compare_digest(mark, seal(key, side, frame))


def _proof(key: bytes, side: Side, address: str, challenge: bytes, hello: Hello) -> bytes:
    said = (side, address, challenge, msgspec.structs.replace(hello, proof=b""))
    return hmac.new(key, _CONTEXT + _encoder.encode(said), hashlib.sha256).digest()
