"""What the process of rank 0 says to those of the other ranks, and they to it: msgpack, over a pipe of their own."""

from __future__ import annotations

import zlib
from typing import Any, cast

import msgspec
import numpy as np

from baton.engine.config import EngineConfig
from baton.engine.plan import DraftPlan, DraftResult, StepPlan

# A prompt of a million tokens in pages of one token makes block tables of this order.
MAX_MESSAGE_BYTES = 1 << 30


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first order: who the rank is. `store`: a file of the ranks alone, by which they find each other."""

    config: EngineConfig
    rank: int
    store: str


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """The second order: the pages of each group, and the file in which they lie with its first byte; None: the rank
    allocates them itself. `aux_layers`: of which the drafter of stage 0 is fed."""

    num_pages: dict[str, int]
    files: dict[str, tuple[str, int]] | None
    aux_layers: list[int]


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Copy a page."""

    group: str
    source: int
    destination: int


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute the target's half of a step; no token is chosen."""

    plan: StepPlan


class Draft(msgspec.Struct, frozen=True, tag="draft"):
    """Compute the drafter's half of it."""

    plan: DraftPlan


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to each: all that was asked is written. `drafts`: the `digest` of a plan's drafts, of a rank that has
    the drafter."""

    drafts: int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last: the rank ends, and why."""

    cause: str


Order = Start | Allocate | Copy | Compute | Draft
Answer = Done | Failed


def _to_builtin(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} in a message between ranks")


def _from_builtin(kind: Any, value: Any) -> Any:
    # The plans' annotations say each array's type of numbers: NDArray[np.int64].
    (dtype,) = kind.__args__[1].__args__
    shape, data = value
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
_ORDERS = msgspec.msgpack.Decoder(Order, dec_hook=_from_builtin)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def digest(result: DraftResult) -> int:
    """A digest by which ranks see that they have the same drafts, of which the next plan's rows are made."""
    return zlib.crc32(msgspec.msgpack.encode(result.drafts))


def encode(message: Order | Answer) -> bytes:
    """The message as bytes."""
    return _ENCODER.encode(message)


def decode_order(data: bytes) -> Order:
    """What rank 0 said. Raises `msgspec.MsgspecError`."""
    return cast(Order, _ORDERS.decode(data))


def decode_answer(data: bytes) -> Answer:
    """What another rank answered. Raises `msgspec.MsgspecError`."""
    return cast(Answer, _ANSWERS.decode(data))
