"""Messages between rank 0 and each other rank: msgpack over a pipe per rank."""

from __future__ import annotations

import zlib
from typing import Any, cast

import msgspec
import numpy as np

from baton.drafters.base import TargetRead
from baton.engine.config import EngineConfig
from baton.engine.step_plans import DraftPlan, DraftResult, StepPlan

# A prompt of a million tokens in pages of one token has block tables of about this size.
MAX_MESSAGE_BYTES = 1 << 30


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first order. `store`: the file store."""

    config: EngineConfig
    rank: int
    store: str


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """The second order. `files`: path and byte offset of each group's pages; None: the rank allocates them.
    `aux_layers`, `target_reads`: those of the drafter, which is on stage 0."""

    num_pages: dict[str, int]
    files: dict[str, tuple[str, int]] | None
    aux_layers: list[int]
    target_reads: list[TargetRead]


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    group: str
    source: int
    destination: int


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    plan: StepPlan


class Draft(msgspec.Struct, frozen=True, tag="draft"):
    plan: DraftPlan


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to each order. `drafts`: the `drafts_digest`, from ranks with the drafter."""

    drafts: int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last answer: the rank ends because of `cause`."""

    cause: str


Order = Start | Allocate | Copy | Compute | Draft
Answer = Done | Failed


def _to_builtin(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} in a message between ranks")


def _from_builtin(kind: Any, value: Any) -> Any:
    # From an annotation such as NDArray[np.int64].
    (dtype,) = kind.__args__[1].__args__
    shape, data = value
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
_ORDERS = msgspec.msgpack.Decoder(Order, dec_hook=_from_builtin)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def drafts_digest(result: DraftResult) -> int:
    """Compared between ranks, since the next plan's rows contain the drafts."""
    return zlib.crc32(msgspec.msgpack.encode(result.drafts))


def encode_message(message: Order | Answer) -> bytes:
    return _ENCODER.encode(message)


def decode_order(data: bytes) -> Order:
    """Raises `msgspec.MsgspecError`."""
    return cast(Order, _ORDERS.decode(data))


def decode_answer(data: bytes) -> Answer:
    """Raises `msgspec.MsgspecError`."""
    return cast(Answer, _ANSWERS.decode(data))
