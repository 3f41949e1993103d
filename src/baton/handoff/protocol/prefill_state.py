"""P's phase, what P's engine has done with the attempt, and what D has sent."""

from __future__ import annotations

from baton.handoff.protocol.attempt_machine import AttemptMachine
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.phases import EnginePhase, PeerPhase
from baton.handoff.protocol.phases import PrefillPhase as Phase
from baton.handoff.protocol.transitions import PREFILL, PREFILL_ENGINE, PREFILL_PEER
from baton.wire import Integrity, Mode

# Failed, and D may still read the pages.
AWAITING = (Phase.AWAITING_READER, Phase.AWAITING_ACK)


class PrefillState(AttemptMachine[Phase]):
    def __init__(self, key: AttemptKey, mode: Mode, max_retries: int, integrity: Integrity) -> None:
        super().__init__(key, mode, max_retries, integrity, PREFILL, Phase.OPEN)
        self.engine = EnginePhase.ABSENT
        self.peer = PeerPhase.SILENT

    def _engine_step(self, event: str) -> None:
        self.engine = PREFILL_ENGINE.after(self.engine, event, self._events)

    def _peer_step(self, event: str) -> None:
        self.peer = PREFILL_PEER.after(self.peer, event, self._events)

    @property
    def closing(self) -> bool:
        """Whether the attempt has failed, but its pages are not proven quiet yet."""
        return self.phase is Phase.STOPPING or self.phase in AWAITING

    @property
    def closed(self) -> bool:
        """Only the terminal reply is needed from now on."""
        return self.phase is Phase.CLOSED

    @property
    def opened(self) -> bool:
        return self.engine not in (EnginePhase.ABSENT, EnginePhase.RELEASE_DUE)

    @property
    def released(self) -> bool:
        return self.engine in (EnginePhase.RELEASED, EnginePhase.RELEASE_DUE)

    @property
    def admitted(self) -> bool:
        """Whether the engine has admitted the request, or has ended it."""
        return self.engine not in (EnginePhase.ABSENT, EnginePhase.OPENED)

    @property
    def claimed(self) -> bool:
        return self.peer in (PeerPhase.ANNOUNCED, PeerPhase.REGISTERED)

    @property
    def registered(self) -> bool:
        return self.peer is PeerPhase.REGISTERED
