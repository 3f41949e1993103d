"""What the agent keeps per attempt, and the tables of attempts."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.session.session import Session
from baton.transports.base import Peer

# Tombstones answer peers until their ticket expires, and for at least TOMBSTONE_S seconds.
MAX_TOMBSTONES = 1 << 16
TOMBSTONE_S = 60.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """Times are monotonic seconds."""

    expiry: float  # of the ticket
    begun: float | None = None  # start of the handoff's time limit
    # All peers that may have exchanged pages; all must be fenced.
    peers: list[Peer] = field(default_factory=list)
    # The peer through which the other side last asked for copies: it may have closed earlier sessions.
    open: Peer | None = None
    peer_instance: Instance | None = None
    next_tick: float = 0.0  # when to repeat the last message
    gap: float = 0.0  # the interval after that
    copied: tuple[float, float] | None = None  # when the first and last copy ended

    def on_copy(self, now: float) -> None:
        self.copied = (now if self.copied is None else self.copied[0], now)

    def on_hello(self, session: Session) -> None:
        if session.hello is not None and session.peer is not None and session.peer not in self.peers:
            self.peers.append(session.peer)
            self.peer_instance = session.hello.instance

    def on_request(self, session: Session) -> None:
        """The other side has asked for copies in this session."""
        self.on_hello(session)
        self.open = session.peer

    @property
    def peer(self) -> Peer | None:
        return self.peers[-1] if self.peers else None

    @property
    def fenced(self) -> bool:
        return bool(self.peers) and all(peer.fenced() for peer in self.peers)


@dataclass(slots=True, eq=False)
class PrefillAttempt(_Attempt):
    """`session`: the one of D's last message."""

    machine: PrefillHandoff = field(kw_only=True)
    session: Session | None = None

    def is_from_peer(self, session: Session) -> bool:
        """False if D's messages come from another engine."""
        before = self.session.hello if self.session is not None else None
        return before is None or (session.hello is not None and session.hello.engine_id == before.engine_id)

    def served(self, session: Session) -> bool:
        """D's claim is checked: this session may repeat it, or register."""
        return self.machine.claimed and (self.machine.closed or session.peer is not None)

    def waits_for(self, session: Session) -> bool:
        """D's claim is checked, and this session's transport is connecting."""
        return self.machine.claimed and not self.machine.closed and session.is_connecting

    def restart_time_limit(self, now: float) -> None:
        if not (self.machine.registered and self.machine.admitted):
            self.begun = now

    def on_admitted(self, now: float) -> None:
        if self.begun is not None:
            self.begun = now

    def deadline(self, handoff_s: float) -> float:
        """The ticket's expiry; once the engine has opened the leg and D has sent a claim, `handoff_s` after the last of
        ANNOUNCE, first REGISTER and admission.
        """
        return self.expiry if self.begun is None or not self.machine.opened else self.begun + handoff_s


@dataclass(slots=True, eq=False)
class DecodeAttempt(_Attempt):
    """`address`: of P's rank. `num_sources`: P's ranks in the ticket."""

    machine: DecodeHandoff = field(kw_only=True)
    address: str = field(kw_only=True)
    num_sources: int = 1

    def wrong_rank(self, peer: Instance) -> str:
        """Why the rank at the address is not the ticket's; empty if it is."""
        if peer.num_ranks != self.num_sources:
            return f"P has {peer.num_ranks} ranks, the ticket names {self.num_sources}"
        rank = self.machine.key.source_rank
        return f"rank {peer.rank} is at {self.address} instead of rank {rank}" if peer.rank != rank else ""

    def on_placed(self, now: float, admitted: bool) -> None:
        if admitted or self.machine.is_admitted:
            self.begun = now

    def on_answer(self, now: float) -> None:
        """P sends its first after admission."""
        if self.begun is None and not self.machine.takes_pages:
            self.begun = now

    def deadline(self, handoff_s: float) -> float:
        """Waiting for P's admission and for pages has no limit."""
        return math.inf if self.begun is None else self.begun + handoff_s


AttemptT = TypeVar("AttemptT", PrefillAttempt, DecodeAttempt)


class AttemptTable(Generic[AttemptT]):
    """Live attempts and tombstones of one side."""

    def __init__(self) -> None:
        self.live: dict[AttemptKey, AttemptT] = {}
        self.ended: dict[AttemptKey, AttemptT] = {}
        self._transfers: dict[bytes, set[AttemptKey]] = {}
        # (when it may be dropped, tie-breaker, key) per tombstone.
        self._ends: list[tuple[float, int, AttemptKey]] = []
        self._numbers = itertools.count()

    def get(self, key: AttemptKey) -> AttemptT | None:
        return self.live.get(key) or self.ended.get(key)

    def add(self, key: AttemptKey, attempt: AttemptT) -> AttemptT:
        self.live[key] = attempt
        self._transfers.setdefault(key.transfer_id, set()).add(key)
        return attempt

    def same_transfer(self, key: AttemptKey) -> set[AttemptKey]:
        return self._transfers.get(key.transfer_id, set())

    def to_tombstone(self, key: AttemptKey, now: float) -> None:
        attempt = self.live.get(key)
        if attempt is not None and attempt.machine.closed:
            self.ended[key] = self.live.pop(key)
            heapq.heappush(self._ends, (max(attempt.expiry, now + TOMBSTONE_S), next(self._numbers), key))
            if len(self.ended) > MAX_TOMBSTONES:
                self._drop_first()

    def forget(self, now: float, margin: float) -> None:
        """Drop tombstones `margin` seconds after their end."""
        while self._ends and now > self._ends[0][0] + margin:
            self._drop_first()

    def _drop_first(self) -> None:
        _, _, key = heapq.heappop(self._ends)
        del self.ended[key]
        keys = self._transfers[key.transfer_id]
        keys.discard(key)
        if not keys:
            del self._transfers[key.transfer_id]
