"""Makes the bytes that a stranger sends to a ZeroMQ socket below the message level: valid and broken greetings,
commands and frames of ZMTP, and CURVE handshakes by a client that knows the listener's public key but has no authorised
key of its own.

ZMTP is RFC 37 of rfc.zeromq.org, CURVE RFC 26.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MORE, LONG, COMMAND = 1, 2, 4
_MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"", b"curve", b"\xff" * 20)
_SOCKET_TYPES = (
    b"DEALER",
    b"ROUTER",
    b"REQ",
    b"REP",
    b"PAIR",
    b"PUB",
    b"SUB",
    b"XPUB",
    b"SERVER",
    b"STREAM",
    b"",
    b"x",
)
_COMMANDS = (
    b"READY",
    b"ERROR",
    b"HELLO",
    b"WELCOME",
    b"INITIATE",
    b"MESSAGE",
    b"SUBSCRIBE",
    b"CANCEL",
    b"PING",
    b"PONG",
)
# The first id that a ROUTER gives a connection: C's `rand` without a seed.
_FIRST_ID = 0x6B8B4567
_KEY, _NONCE, _MAC = 32, 24, 16


def greeting(mechanism: bytes = b"CURVE", version: tuple[int, int] = (3, 1), as_server: bool = False) -> bytes:
    """The 64 bytes with which a connection begins."""
    return SIGNATURE + bytes(version) + mechanism[:20].ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def frame(body: bytes, flags: int = 0, size: int | None = None) -> bytes:
    """A frame. `size`: the length that its header states."""
    length = len(body) if size is None else size
    if length > 255 or flags & LONG:
        return bytes([flags | LONG]) + (length & (1 << 64) - 1).to_bytes(8, "big") + body
    return bytes([flags, length]) + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, COMMAND)


def metadata(properties: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(bytes([len(k)]) + k + len(v).to_bytes(4, "big") + v for k, v in properties)


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


@dataclass(frozen=True, slots=True)
class Step:
    """A connection's next action: send `data`, which holds `frames` frames, or `wait` for an answer."""

    data: bytes = b""
    frames: int = 0
    wait: bool = False


class ZmtpMaker:
    """An endless source of connections, reproducible for the same `rng`. `server`: the listener's public key,
    if known.
    """

    def __init__(self, rng: random.Random, server: bytes | None = None) -> None:
        self.rng = rng
        self._server = server
        self._sodium = Sodium() if server is not None else None
        self._claimed = 0

    def steps(self) -> Iterator[Step | Handshake]:
        """One connection's steps. For a `Handshake`, the caller makes INITIATE from the answer to the step before."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.05:
            yield Step(rng.randbytes(rng.choice((0, 1, 9, 10, 11, 63, 64, 65, 4000))), 1)
            return
        if roll < 0.15:
            yield Step(self._damaged(self._any_greeting()), 1)
            return
        if self._sodium is not None and self._server is not None and roll < 0.45:
            yield Step(greeting(), 1)
            shake = Handshake(self._sodium, self._server, self._sodium.pair(), self._sodium.pair())
            hello = shake.hello()
            yield Step(self._damaged(hello) if rng.random() < 0.3 else hello, 1, wait=True)
            yield shake
        elif roll < 0.60:
            yield Step(greeting() + command(b"HELLO", self._hello_body()), 2)
        elif roll < 0.70:
            # Clients that a listener without keys accepts, some under the id of a connection that is yet to come.
            known = [(b"Socket-Type", b"DEALER"), (b"Identity", rng.choice((self._claim(), b"")))]
            yield Step(greeting(b"NULL") + command(b"READY", metadata(known)), 2)
            return
        elif roll < 0.85:
            # As for a listener that accepts everybody.
            yield Step(greeting(b"NULL") + command(b"READY", metadata(self.properties())), 2)
        else:
            yield Step(self._any_greeting(), 1)
        count = rng.choice((0, 1, 4, 30, 100))
        yield Step(b"".join(self.any_frame() for _ in range(count)), count)

    def properties(self) -> list[tuple[bytes, bytes]]:
        """Properties of a READY or INITIATE: sensible ones, senseless ones, and ids that only the listener
        may assign.
        """
        rng = self.rng
        identity = rng.choice((self._claim(), b"", b"x", rng.randbytes(5), rng.randbytes(255), bytes(256)))
        found = [(b"Socket-Type", rng.choice(_SOCKET_TYPES)), (b"Identity", identity)]
        if rng.random() < 0.2:
            found += [(rng.randbytes(rng.randrange(256)), rng.randbytes(rng.choice((0, 1, 300))))]
        if rng.random() < 0.1:
            found *= rng.choice((2, 40))
        rng.shuffle(found)
        return found

    def _claim(self) -> bytes:
        # A connection without an identity gets the next number.
        self._claimed += self.rng.random() < 0.5
        return b"\0" + (_FIRST_ID + self._claimed + self.rng.randrange(40)).to_bytes(4, "big")

    def any_frame(self) -> bytes:
        """A frame or command, half of them well-formed; some begin messages that never end."""
        rng = self.rng
        if rng.random() < 0.5:
            name = rng.choice(_COMMANDS)
            body = rng.choice((b"", metadata(self.properties()), self._hello_body(), rng.randbytes(rng.randrange(300))))
            made = command(name, body)
        else:
            size = rng.choice((None, None, None, 0, 255, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1))
            flags = rng.choice((0, MORE, MORE, LONG, MORE | LONG, COMMAND | MORE, 0x78, 0xFF))
            made = frame(rng.randbytes(rng.choice((0, 1, 33, 300))), flags, size)
        return self._damaged(made) if rng.random() < 0.3 else made

    def _any_greeting(self) -> bytes:
        rng = self.rng
        version = rng.choice(((3, 1), (3, 0), (2, 0), (1, 0), (0, 0), (4, 0), (255, 255)))
        made = greeting(rng.choice(_MECHANISMS), version, rng.random() < 0.3)
        # The first bytes decide which protocol engine of libzmq reads the rest.
        old = (
            b"\x01\x00",
            b"\x06\x00claim",
            b"\xff" + bytes(7) + b"\x06\x7f\x00claim",
            SIGNATURE + b"\x01\x05\x00\x00",
        )
        return rng.choice(old) if rng.random() < 0.2 else made[: rng.choice((10, 11, 12, 40, 64, 64, 64))]

    def _hello_body(self) -> bytes:
        rng = self.rng
        return b"\1\0" + bytes(72) + rng.randbytes(32) + (1).to_bytes(8, "big") + rng.randbytes(80)

    def _damaged(self, data: bytes) -> bytes:
        return damaged(self.rng, data)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """`data` with one to three bytes changed, pieces put in, or its end cut off."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(made) + 1)
        what = rng.randrange(4)
        if what == 0:
            del made[at:]
        elif what == 1:
            made[at:at] = rng.randbytes(rng.choice((1, 8)))
        elif at < len(made):
            made[at] ^= 1 << rng.randrange(8)
    return bytes(made)
