"""The bytes of ZMTP (RFC 37 of rfc.zeromq.org): greetings, frames and commands; and random damage."""

from __future__ import annotations

import random

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MORE, LONG, COMMAND = 1, 2, 4


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
