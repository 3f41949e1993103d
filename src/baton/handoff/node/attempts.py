"""What the agent keeps per attempt."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.handoff.channel.sessions import Session
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.transports.base import Peer

# Ended attempts are kept as tombstones until their ticket has expired, and for TOMBSTONE_S seconds at least, in which a
# peer asks how they ended. Beyond this many those go that would go first.
MAX_TOMBSTONES = 1 << 16
TOMBSTONE_S = 60.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """Common part. `expiry` is the time (monotonic seconds) at which the ticket expires, `begun` that from which the
    handoff's own time counts.

    `peers` are the transport's ends of all sessions in which pages could have been exchanged: all of them must be
    fenced. Copies use `open`, the end of the session in which the peer asked for them last: a peer that has given the
    attempt up since has closed that end alone, and knows of no other. `far` is what the peer said of its instance.
    `next_tick` is when the last message is repeated, `gap` how long after that again.
    """

    expiry: float
    begun: float | None = None
    peers: list[Peer] = field(default_factory=list)
    open: Peer | None = None
    far: Instance | None = None
    expired: bool = False
    next_tick: float = 0.0
    gap: float = 0.0

    def meet(self, session: Session) -> None:
        """The peer's HELLO of a session is known."""
        if session.hello is not None and session.peer is not None and session.peer not in self.peers:
            self.peers.append(session.peer)
            self.far = session.hello.instance

    def asked(self, session: Session) -> None:
        """The peer has shown its pages, or asked for copies, in this session."""
        self.meet(session)
        self.open = session.peer

    @property
    def peer(self) -> Peer | None:
        """The transport's end of the last session."""
        return self.peers[-1] if self.peers else None

    @property
    def fenced(self) -> bool:
        """True when the peer is proven to touch no memory of ours any more."""
        return bool(self.peers) and all(peer.fenced() for peer in self.peers)


@dataclass(slots=True, eq=False)
class PrefillAttempt(_Attempt):
    """P's half of one attempt. `session` is the session from which D spoke last."""

    machine: PrefillHandoff = field(kw_only=True)
    session: Session | None = None

    def may_hear(self, session: Session) -> bool:
        """True unless another engine has spoken for D's half of the attempt before."""
        before = self.session.hello if self.session is not None else None
        return before is None or (session.hello is not None and session.hello.engine_id == before.engine_id)

    def served(self, session: Session) -> bool:
        """Whether D's claim was checked before, so that this session may repeat it, or register what it announced."""
        return self.claimed and (self.machine.closed or session.peer is not None)

    def waits_for(self, session: Session) -> bool:
        """Whether D's claim was checked before, and is to be taken up when this session is connected."""
        return self.claimed and not self.machine.closed and session.connecting is not None

    @property
    def claimed(self) -> bool:
        """Whether a claim of D was taken."""
        return self.machine.announced or self.machine.registered

    def heard(self, now: float) -> None:
        """D has spoken of the attempt. Each ANNOUNCE, and the first REGISTER, start its time anew."""
        if not self.machine.registered:
            self.begun = now

    def deadline(self, handoff_s: float) -> float:
        """When the attempt ends at the latest: an engine can take the leg, and D come, until the ticket expires; after
        that D says time and again that it waits, until it has registered."""
        return self.expiry if self.begun is None or not self.machine.opened else self.begun + handoff_s


@dataclass(slots=True, eq=False)
class DecodeAttempt(_Attempt):
    """D's half of one attempt. `address` is that of P's rank, `num_sources` how many ranks its ticket names."""

    machine: DecodeHandoff = field(kw_only=True)
    address: str = field(kw_only=True)
    num_sources: int = 1

    def misled(self, peer: Instance) -> str:
        """Why the engine at the address is not the P of the ticket, which names each of its ranks; an empty string
        where it is."""
        if peer.num_ranks != self.num_sources:
            return f"P has {peer.num_ranks} ranks, the ticket names {self.num_sources}"
        rank = self.machine.key.source_rank
        return f"rank {peer.rank} is at {self.address} instead of rank {rank}" if peer.rank != rank else ""

    def deadline(self, handoff_s: float) -> float:
        """When the attempt ends at the latest: waiting for P to admit it, and for pages, is no failure."""
        return math.inf if self.begun is None else self.begun + handoff_s


AttemptT = TypeVar("AttemptT", PrefillAttempt, DecodeAttempt)


class Book(Generic[AttemptT]):
    """Attempts of one side by key: live ones, and tombstones; a look at the clock touches only those it drops."""

    def __init__(self) -> None:
        self.live: dict[AttemptKey, AttemptT] = {}
        self.ended: dict[AttemptKey, AttemptT] = {}
        self._transfers: dict[bytes, set[AttemptKey]] = {}
        # Of each tombstone when nobody can ask for it any more, and a number, by which equal times are ordered.
        self._ends: list[tuple[float, int, AttemptKey]] = []
        self._numbers = itertools.count()

    def get(self, key: AttemptKey) -> AttemptT | None:
        """The attempt, live or ended."""
        return self.live.get(key) or self.ended.get(key)

    def add(self, key: AttemptKey, attempt: AttemptT) -> AttemptT:
        """Keep a new attempt."""
        self.live[key] = attempt
        self._transfers.setdefault(key.transfer_id, set()).add(key)
        return attempt

    def same_transfer(self, key: AttemptKey) -> set[AttemptKey]:
        """Keys of all known attempts of the same transfer."""
        return self._transfers.get(key.transfer_id, set())

    def settle(self, key: AttemptKey, now: float) -> None:
        """Make an attempt that has closed by `now` (monotonic seconds) a tombstone."""
        attempt = self.live.get(key)
        if attempt is not None and attempt.machine.closed:
            self.ended[key] = self.live.pop(key)
            heapq.heappush(self._ends, (max(attempt.expiry, now + TOMBSTONE_S), next(self._numbers), key))
            if len(self.ended) > MAX_TOMBSTONES:
                self._drop_first()

    def forget(self, now: float, margin: float) -> None:
        """Drop tombstones that nobody can ask for any more, `margin` seconds after that; `now` in monotonic seconds."""
        while self._ends and now > self._ends[0][0] + margin:
            self._drop_first()

    def _drop_first(self) -> None:
        _, _, key = heapq.heappop(self._ends)
        del self.ended[key]
        keys = self._transfers[key.transfer_id]
        keys.discard(key)
        if not keys:
            del self._transfers[key.transfer_id]
