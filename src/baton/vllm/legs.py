"""Legs of vLLM's scheduler and of a worker, with their phases.

Three sides act independently on a prefill leg: vLLM computes or preempts its blocks, vLLM finishes its request, and the
agent releases its blocks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from baton.handoff.protocol.phases import Phase
from baton.handoff.protocol.ticket import SignedTicket
from baton.handoff.protocol.transitions import Table
from baton.vllm.steps import Tables
from baton.wire import Mode


@dataclass(slots=True, eq=False)
class SchedulerPrefill:
    """`seeded`: D gets the token sampled here. `cancelled`: D will not fetch the KV. `lost`: preempted.
    `is_prefix`: of a hand-back.
    """

    ticket: SignedTicket
    num_tokens: int
    seeded: bool = False
    is_prefix: bool = False
    num_computed: int = 0
    tables: Tables = ()
    cancelled: bool = False
    lost: bool = False
    pinned: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SchedulerDecode:
    """`admitted`: own ranks that have P's admission. `receiving`: vLLM waits for KV in its blocks. `hit`: tokens that
    were here. `is_prefix`: of a hand-back.
    """

    ticket: SignedTicket
    num_tokens: int
    is_prefix: bool = False
    whole_blocks: bool = False
    admitted: set[int] = field(default_factory=set)
    receiving: bool = False
    hit: int = 0


class BlocksPhase(Phase):
    """Phase of a prefill leg's blocks."""

    COMPUTING = "computing"
    COMPUTED = "computed"  # the whole prompt has been declared final
    PREEMPTED = "preempted"  # vLLM gives the blocks to other requests


class EndPhase(Phase):
    """Who has ended a prefill leg."""

    OPEN = "open"
    CLOSED = "closed"  # vLLM has finished the request; the agent may still need its blocks
    RELEASED = "released"  # the agent no longer needs the blocks; vLLM has not finished the request
    SETTLED = "settled"  # both: the blocks may be freed


class ReceivePhase(Phase):
    """Phase of a decode leg."""

    ANNOUNCED = "announced"  # it has no blocks
    PARKED = "parked"  # it has blocks, and vLLM waits for their KV
    PLACED = "placed"  # it has blocks, and vLLM waits for nothing: no KV was missing


_B, _E, _D = BlocksPhase, EndPhase, ReceivePhase
BLOCKS = Table(
    "Blocks of vLLM's prefill leg",
    {
        "computed": {_B.COMPUTING: _B.COMPUTED},
        "preempted": {_B.COMPUTING: _B.PREEMPTED, _B.COMPUTED: _B.PREEMPTED},
    },
    {},
)
PREFILL_END = Table(
    "End of vLLM's prefill leg",
    {
        "finished": {_E.OPEN: _E.CLOSED, _E.RELEASED: _E.SETTLED},
        "released": {_E.OPEN: _E.RELEASED, _E.CLOSED: _E.SETTLED},
    },
    {},
)
DECODE_LEG = Table("vLLM's decode leg", {"park": {_D.ANNOUNCED: _D.PARKED}, "place": {_D.ANNOUNCED: _D.PLACED}}, {})


@dataclass(slots=True, eq=False)
class WorkerPrefill:
    """`blocks` and `end` change as in `BLOCKS` and `PREFILL_END`. `next_token`: the one that D computes, None if it is
    handed over too. `seeded`: as `SchedulerPrefill`. `final`: as last declared to the agent. `held`: vLLM keeps the
    finished request's blocks until they are reported free."""

    request_id: str
    num_tokens: int
    next_token: int | None
    mode: Mode
    seeded: bool = False
    blocks: BlocksPhase = BlocksPhase.COMPUTING
    end: EndPhase = EndPhase.OPEN
    final: dict[str, int] = field(default_factory=dict)
    held: bool = False

    def blocks_step(self, event: str) -> None:
        """Raises `UndefinedTransitionError`."""
        self.blocks = BLOCKS.after(self.blocks, event)

    def end_step(self, event: str) -> None:
        """Raises `UndefinedTransitionError`."""
        self.end = PREFILL_END.after(self.end, event)

    @property
    def is_preempted(self) -> bool:
        return self.blocks is BlocksPhase.PREEMPTED

    @property
    def is_released(self) -> bool:
        return self.end in (EndPhase.RELEASED, EndPhase.SETTLED)


@dataclass(slots=True, eq=False)
class WorkerDecode:
    """`phase` changes as in `DECODE_LEG`. `next_token`: the one after the tokens that P sends.

    `traceparent`: if vLLM traces the request; then `marks` are monotonic seconds by event.
    """

    request_id: str
    next_token: int
    mode: Mode
    traceparent: str | None = None
    phase: ReceivePhase = ReceivePhase.ANNOUNCED
    marks: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    def mark(self, name: str) -> None:
        if self.traceparent is not None:
            self.marks[name] = time.monotonic()

    def step(self, event: str) -> None:
        """Raises `UndefinedTransitionError`."""
        self.phase = DECODE_LEG.after(self.phase, event)
