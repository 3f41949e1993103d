"""Makes the bytes that a stranger sends to a ZeroMQ socket below the message level: valid and broken greetings,
commands and frames of ZMTP, and CURVE handshakes.
"""

from __future__ import annotations

import random

from simulation.fuzz.curve import WELCOME_BYTES, Handshake, Sodium
from simulation.fuzz.pool import Kinds, Pool, Step, Steps
from simulation.fuzz.wire import COMMAND, LONG, MORE, SIGNATURE, command, damaged, frame, greeting, metadata

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
# Weights of the kinds of connections.
_KINDS = {
    "noise": 0.05,
    "damaged greeting": 0.10,
    "hello": 0.45,
    "claimed id": 0.10,
    "ready": 0.15,
    "any greeting": 0.15,
}
_WITH_PUBLIC_KEY = {**_KINDS, "hello": 0.15, "handshake": 0.21, "damaged handshake": 0.09}


class ZmtpMaker:
    """An endless source of connections, reproducible for the same `rng`. `server`: the listener's public key,
    if known.
    """

    def __init__(self, rng: random.Random, server: bytes | None = None) -> None:
        self.rng = rng
        self._server = server
        self._sodium = Sodium() if server is not None else None
        self._claimed = 0
        self._frames = Pool(rng, self.any_frame)
        self.kinds = Kinds(rng, _KINDS if server is None else _WITH_PUBLIC_KEY)

    def steps(self) -> Steps:
        """One connection's steps. Handshakes are new for each connection; the frames after them come from a pool."""
        rng = self.rng
        match self.kinds.choose():
            case "noise":
                yield Step(rng.randbytes(rng.choice((0, 1, 9, 10, 11, 63, 64, 65, 4000))), 1)
                return
            case "damaged greeting":
                yield Step(damaged(rng, self._any_greeting()), 1)
                return
            case "claimed id":
                # Clients that a listener without keys accepts, some under the id of a connection that is yet to come.
                known = [(b"Socket-Type", b"DEALER"), (b"Identity", rng.choice((self._claim(), b"")))]
                yield Step(greeting(b"NULL") + command(b"READY", metadata(known)), 2)
                return
            case "handshake":
                yield from self._handshake(broken=False)
            case "damaged handshake":
                yield from self._handshake(broken=True)
            case "hello":
                yield Step(greeting() + command(b"HELLO", self._hello_body()), 2)
            case "ready":
                # As for a listener that accepts everybody.
                yield Step(greeting(b"NULL") + command(b"READY", metadata(self.properties())), 2)
            case _:
                yield Step(self._any_greeting(), 1)
        count = rng.choice((0, 1, 4, 30, 100))
        data = b"".join(self._frames.draw(count))
        yield Step(damaged(rng, data) if rng.random() < 0.3 else data, count)

    def _handshake(self, broken: bool) -> Steps:
        """CURVE with a key that is not authorised, up to INITIATE if WELCOME comes. `broken`: with a damaged HELLO."""
        assert self._sodium is not None
        assert self._server is not None
        yield Step(greeting(), 1)
        shake = Handshake(self._sodium, self._server, self._sodium.pair(), self._sodium.pair())
        hello = shake.hello()
        heard = yield Step(damaged(self.rng, hello) if broken else hello, 1, wait=WELCOME_BYTES)
        initiate = shake.initiate(heard or b"", self.properties(), self.rng)
        if initiate is not None:
            self.kinds.made["initiate"] += 1
            yield Step(initiate, 1)

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
        return damaged(rng, made) if rng.random() < 0.3 else made

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
