"""The session with one rank of a peer engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.handoff.protocol.messages import Hello, Pair
from baton.handoff.protocol.phases import Phase
from baton.handoff.protocol.transitions import HistoryEntry, Table
from baton.handoff.session.base import Connection
from baton.transports.base import Peer

_HISTORY = 8


class SessionPhase(Phase):
    GREETING = "greeting"  # the peer has not yet proven that it knows the ticket key
    CONNECTING = "connecting"  # its engine fits; the transport connects
    READY = "ready"  # attempts may use it
    UNREACHABLE = "unreachable"  # the transport cannot connect; another claim of the peer tries again
    REFUSED = "refused"  # its engine does not fit: no KV may be exchanged
    ENDED = "ended"  # forgotten by this side


_S = SessionPhase
SESSION = Table(
    "Session",
    {
        "connect": {_S.GREETING: _S.CONNECTING, _S.UNREACHABLE: _S.CONNECTING},
        "connected": {_S.CONNECTING: _S.READY},
        "not reached": {_S.GREETING: _S.UNREACHABLE, _S.CONNECTING: _S.UNREACHABLE},
        "refuse": {_S.GREETING: _S.REFUSED},
        "hang up": dict.fromkeys((_S.GREETING, _S.CONNECTING, _S.READY, _S.UNREACHABLE, _S.REFUSED), _S.ENDED),
    },
    {},
)


@dataclass(slots=True, eq=False)
class Session:
    """`phase` follows the table `SESSION`. `hello`: the peer's, once proven. `connecting` is set while the transport
    connects, `peer` after that. `refusal`: `(reason, message)` if no KV may be exchanged. `challenge`: the peer's that
    we last sent a proof for. The peer counts as alive for `lease` seconds after `last_heard` (monotonic seconds).
    `until`: keep redialling until then (`Sessions.may_return`). `used`: when an attempt last needed it. `redials`:
    successive sessions with this address that ended unproven. `round_trip`: in seconds. `groups`: this engine's groups
    whose KV moves, None for all.
    """

    connection: Connection
    phase: SessionPhase = SessionPhase.GREETING
    hello: Hello | None = None
    connecting: Future[Peer] | None = None
    peer: Peer | None = None
    pairs: Mapping[Pair, frozenset[str]] = field(default_factory=dict)
    groups: frozenset[str] | None = None
    refusal: tuple[str, str] | None = None
    challenge: bytes = b""
    next_hello: float = 0.0
    redials: int = 0
    until: float = 0.0
    used: float = 0.0
    last_heard: float = 0.0
    lease: float = 0.0
    round_trip: float | None = None
    nonce: int = 0
    renew_sent: float = 0.0
    _history: deque[HistoryEntry] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def step(self, event: str) -> None:
        """Raises `UndefinedTransitionError`."""
        self.phase = SESSION.after(self.phase, event, self._history)
        self._history.append((event, self.phase))

    @property
    def ready(self) -> bool:
        return self.phase is SessionPhase.READY

    @property
    def is_connecting(self) -> bool:
        return self.phase is SessionPhase.CONNECTING

    @property
    def established(self) -> bool:
        return self.phase in (SessionPhase.CONNECTING, SessionPhase.READY)

    def is_same(self, other: Session) -> bool:
        """Whether both lead to the same process, by the same key."""
        mine, theirs = self.hello, other.hello
        if mine is None or theirs is None or self.connection.engine != other.connection.engine:
            return False
        ends = [(hello.engine_id, hello.incarnation, hello.instance.rank) for hello in (mine, theirs)]
        return ends[0] == ends[1]
