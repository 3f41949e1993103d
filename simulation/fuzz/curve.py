"""CURVE handshakes (RFC 26 of rfc.zeromq.org) by a client that knows the listener's public key, without an authorised
key of its own.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from pathlib import Path

import zmq

from simulation.fuzz.wire import command, metadata

_KEY, _MAC = 32, 16
# The greeting, and the frame of WELCOME.
WELCOME_BYTES = 64 + 2 + 168


class Sodium:
    """The boxes of CURVE, with the libsodium that comes with pyzmq."""

    def __init__(self) -> None:
        folder = Path(zmq.__file__).parent.parent / "pyzmq.libs"
        self._library = ctypes.CDLL(str(next(folder.glob("libsodium*"))))

    def pair(self) -> tuple[bytes, bytes]:
        public, secret = ctypes.create_string_buffer(_KEY), ctypes.create_string_buffer(_KEY)
        self._library.crypto_box_keypair(public, secret)
        return public.raw, secret.raw

    def box(self, text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(text) + _MAC)
        self._library.crypto_box_easy(out, text, ctypes.c_ulonglong(len(text)), nonce, public, secret)
        return out.raw

    def open(self, boxed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes | None:
        """Decrypt. Returns None if the box is not authentic."""
        if len(boxed) < _MAC:
            return None
        out = ctypes.create_string_buffer(max(1, len(boxed) - _MAC))
        size = ctypes.c_ulonglong(len(boxed))
        if self._library.crypto_box_open_easy(out, boxed, size, nonce, public, secret) != 0:
            return None
        return out.raw[: len(boxed) - _MAC]


@dataclass(slots=True)
class Handshake:
    """One client's side of CURVE: `hello`, and `initiate` in answer to WELCOME. `server` is the listener's
    public key.
    """

    sodium: Sodium
    server: bytes
    own: tuple[bytes, bytes]  # public, secret
    short: tuple[bytes, bytes]

    def hello(self) -> bytes:
        nonce = (1).to_bytes(8, "big")
        boxed = self.sodium.box(bytes(64), b"CurveZMQHELLO---" + nonce, self.server, self.short[1])
        return command(b"HELLO", b"\1\0" + bytes(72) + self.short[0] + nonce + boxed)

    def initiate(self, welcome: bytes, properties: list[tuple[bytes, bytes]], rng: random.Random) -> bytes | None:
        """`welcome`: the bytes after the greeting. Returns None if they contain no WELCOME for this client."""
        at = welcome.find(b"\x07WELCOME")
        if at < 0:
            return None
        body = welcome[at + 8 :]
        found = self.sodium.open(body[16:160], b"WELCOME-" + body[:16], self.server, self.short[1])
        if found is None:
            return None
        session, cookie = found[:_KEY], found[_KEY:]
        mark = rng.randbytes(16)
        vouch = self.sodium.box(self.short[0] + self.server, b"VOUCH---" + mark, session, self.own[1])
        nonce = (2).to_bytes(8, "big")
        inner = self.own[0] + mark + vouch + metadata(properties)
        boxed = self.sodium.box(inner, b"CurveZMQINITIATE" + nonce, session, self.short[1])
        return command(b"INITIATE", cookie + nonce + boxed)
