"""P's state machine for one attempt. Pure: events in, actions out. docs/protocol.md has its phases, and when pages are
freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.digests import seeds_digest
from baton.handoff.protocol.final_ranges import FinalRanges
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.phases import EnginePhase, PeerPhase
from baton.handoff.protocol.phases import PrefillPhase as Phase
from baton.handoff.protocol.prefill_state import AWAITING, PrefillState
from baton.wire import Integrity, Mode

_OFFERS = {msg.Commit: "commit", msg.Ready: "offer", msg.Confirm: "confirm", msg.Finished: "finish"}
_OFFERED = (Phase.COMMITTED, Phase.READY, Phase.CONFIRMED, Phase.FINISHED)


class PrefillHandoff(PrefillState):
    """Begins with `Opened`, ANNOUNCE or REGISTER.

    `groups`: those whose bytes this pair of ranks moves; all of P's rank until D's instance is known.

    `handle` raises `ProtocolError` for an ANNOUNCE or REGISTER with another ticket, a REGISTER that contradicts
    `groups`, a REPAIR of tokens that were not wanted, and an event that the tables do not define; the attempt is then
    unchanged.
    """

    def __init__(
        self,
        key: AttemptKey,
        mode: Mode,
        ticket: str,
        groups: Sequence[str],
        max_retries: int = 3,
        integrity: Integrity = "off",
    ) -> None:
        super().__init__(key, mode, max_retries, integrity)
        self._ticket = ticket
        self.groups = frozenset(groups)
        self._register: msg.Register | None = None
        self._ranges = FinalRanges(key, mode, integrity, self.copies)
        self._seeds: msg.Seeds | None = None
        self._offer: msg.AttemptMessage | None = None

    def begun_with(self, ticket: str) -> bool:
        """A closed attempt accepts any ticket, and only answers how it ended."""
        return self.closed or ticket == self._ticket

    def handle(self, event: ev.MachineEvent) -> list[ev.Action]:
        name = self._enter(event)
        match event:
            case ev.Opened():
                return self._opened()
            case ev.PagesGiven():
                self._engine_step(name)
                return self._send_admitted()
            case ev.Received(message):
                return self._receive(message, name)
            case ev.Declared() | ev.LayersWritten() | ev.LayersWithdrawn():
                self._engine_step(name)
                return self._declare(event)
            case ev.Sampled():
                self._engine_step(name)
                return self._sampled(event)
            case ev.CopyEnded():
                return self._copy_ended(event)
            case ev.DigestsComputed():
                return self._digested(event)
            case ev.Abort(reason, message) | ev.Fault(reason, message):
                return self._fail(reason, message)
            case ev.Deadline(message):
                return self._fail("handoff_timeout", message)
            case ev.PeerLost(reason, message, fenced):
                return self._fail(reason, message) + self._release_if_quiet(peer_quiet=fenced)
            case ev.Tick():
                return self._repeat()
        raise AssertionError(f"{name} is in the table and has no handler")

    def _opened(self) -> list[ev.Action]:
        was_released = self.released
        self._engine_step("opened")
        if was_released:
            return [ev.Notify(ev.PrefillReleased(self.key, self.reason))]
        return self._advance()

    def _send_admitted(self) -> list[ev.Action]:
        admitted = self.engine is EnginePhase.ADMITTED and self.peer is PeerPhase.ANNOUNCED
        return [ev.Send(msg.Admitted(self.key))] if admitted and self.phase is Phase.OPEN else []

    def _declare(self, event: ev.Declared | ev.LayersWritten | ev.LayersWithdrawn) -> list[ev.Action]:
        if self.phase is not Phase.OPEN or self._seeds is not None:
            return []
        match event:
            case ev.Declared():
                self._ranges.declare(event)
            case ev.LayersWritten():
                self._ranges.written(event)
            case ev.LayersWithdrawn():
                self._ranges.withdraw()
        return self._advance()

    def _sampled(self, event: ev.Sampled) -> list[ev.Action]:
        if self.phase is not Phase.OPEN or self._seeds is not None:
            return []
        self._seeds = event.seeds
        self._ranges.extend(event.final)
        if not event.finished:
            return self._advance()
        self._step("end")
        return self.copies.cancel() if self.copies.outstanding else self._finish()

    def _receive(self, message: msg.AttemptMessage, name: str) -> list[ev.Action]:
        if isinstance(message, msg.Announce | msg.Register):
            if not self.begun_with(message.ticket):
                raise ProtocolError("the ticket is not the one by which this attempt began")
        else:
            self._peer_step("other message")
        match message:
            case msg.Announce():
                self._peer_step(name)
                # The first token may already have ended the request.
                return self._send_finished() if self.phase is Phase.ENDED else self._send_admitted() + self._reply()
            case msg.Register():
                return self._registered(message, name)
            case msg.ReadDone() if self.phase is Phase.READY:
                assert self._seeds is not None
                return self._make_offer(msg.Confirm(self.key, self._seeds, self._seeds_digest(self._seeds)))
            case msg.ReadDone():
                return self._repeat() if self.phase is Phase.CONFIRMED else self._answer()
            case msg.Repair():
                return self._repair(message)
            case msg.Ack():
                return self._acknowledged()
            case msg.Cancel(_, reason, text):
                return self._cancelled(reason, text)
            case msg.Cancelled(_, reason):
                return self._fail(reason, "cancelled by the decode side", send_cancel=False) + self._release_if_quiet(
                    peer_quiet=True
                )
        raise AssertionError(f"{name} is in the table and has no handler")

    def _registered(self, message: msg.Register, name: str) -> list[ev.Action]:
        if self.registered:
            return self._reply()
        if set(message.wanted) != self.groups:
            raise ProtocolError(f"REGISTER names groups {sorted(message.wanted)}, here {sorted(self.groups)}")
        if self.mode == "push" and set(message.pages) != self.groups:
            raise ProtocolError("REGISTER for push must bring a block table for each group")
        self._peer_step(name)
        if self.phase is Phase.ENDED:
            return self._send_finished()
        if self.phase is not Phase.OPEN:
            # The attempt ended before D registered.
            return self._reply()
        self._register = message
        self._ranges.begin(message)
        return self._advance()

    def _acknowledged(self) -> list[ev.Action]:
        match self.phase:
            case Phase.COMMITTED | Phase.CONFIRMED | Phase.FINISHED:
                outcome = "finished" if self.phase is Phase.FINISHED else "committed"
                self._step("acknowledge")
                self._forget()
                return self._release(outcome)
            case Phase.AWAITING_ACK:
                return self._release_if_quiet(peer_quiet=True)
            case _:
                return []  # nothing was committed

    def _cancelled(self, reason: str, text: str) -> list[ev.Action]:
        """CANCEL is answered when P's own copies have ended."""
        if self.closing or self.closed:
            return self._answer()
        actions = self._fail(reason, text, send_cancel=False)
        # If the attempt closed at once, CANCELLED is among the actions.
        return actions + self._answer() if self.phase in AWAITING else actions

    def _advance(self) -> list[ev.Action]:
        if self.phase is not Phase.OPEN or not self.opened or self._register is None:
            return []
        if self._seeds is not None and (beyond := self._ranges.beyond(self._register)):
            return self._fail("not_final", f"groups {beyond} are wanted beyond the prompt's end")
        actions = self._ranges.follow(self._register)
        if self._seeds is None or not self._ranges.at_rest:
            return actions
        if self.mode == "push":
            return actions + self._make_offer(self._commit(self._seeds))
        held = self._ranges
        return actions + self._make_offer(msg.Ready(self.key, held.final, held.pages, held.digests))

    def _commit(self, seeds: msg.Seeds) -> msg.Commit:
        return msg.Commit(
            self.key,
            final=self._ranges.final,
            seeds=seeds,
            num_bytes=self.copies.num_bytes,
            num_runs=self.copies.num_runs,
            round=self.round,
            digests=self._ranges.digests,
            seeds_digest=self._seeds_digest(seeds),
        )

    def _seeds_digest(self, seeds: msg.Seeds) -> bytes:
        return b"" if self.integrity == "off" else seeds_digest(self.key, seeds)

    def _digested(self, event: ev.DigestsComputed) -> list[ev.Action]:
        self._ranges.digest_ended()
        if self.phase is not Phase.OPEN:
            return []
        copies = self._ranges.digested(event)
        return self._advance() + self._progress(copies)

    def _repair(self, message: msg.Repair) -> list[ev.Action]:
        """A repeated REPAIR is answered by its COMMIT."""
        if self.phase is not Phase.COMMITTED:
            return self._answer()
        if message.round <= self.round:
            return self._repeat()
        assert self._register is not None
        if message.round != self.round + 1:
            raise ProtocolError(f"REPAIR of round {message.round} after round {self.round}")
        if self.round == self.max_retries:
            return self._fail("integrity_failed", f"still bad after {self.round} repairs")
        copies = self._ranges.repair(self._register, message)
        self._step("repair")
        self._offer, self.round = None, message.round
        return [ev.Count("repairs"), *copies, *self._advance()]

    def _finish(self) -> list[ev.Action]:
        """No copy is outstanding: free the pages, and notify D."""
        self._step("copies ended")
        actions = self._release("finished")
        return actions + self._send_finished() if self.claimed else actions

    def _send_finished(self) -> list[ev.Action]:
        assert self._seeds is not None
        return self._make_offer(msg.Finished(self.key, self._seeds))

    def _make_offer(self, offer: msg.AttemptMessage) -> list[ev.Action]:
        self._step(_OFFERS[type(offer)])
        self._offer = offer
        return [ev.Send(offer)]

    def _copy_ended(self, event: ev.CopyEnded) -> list[ev.Action]:
        copy = self.copies.end(event)
        if copy is None:
            return []
        if not self._ranges.computed:
            self.copies.num_hidden += event.num_bytes
        if self.phase is Phase.STOPPING:
            return self._release_if_quiet()
        if self.phase is Phase.ENDING:
            return [] if self.copies.outstanding else self._finish()
        if event.ok:
            return self._advance() + self._progress([copy])
        if self.copies.may_retry:
            return self.copies.retry(copy)
        return self._fail("transfer_failed", event.message)

    def _progress(self, copies: Sequence[ev.StartCopy]) -> list[ev.Action]:
        # A COMMIT makes PROGRESS redundant. After a REPAIR, D ignores it.
        if self.phase is not Phase.OPEN or self.round:
            return []
        return [action for copy in copies for action in self._ranges.progress(copy)]

    def _fail(self, reason: str, message: str, send_cancel: bool = True) -> list[ev.Action]:
        if self.closing or self.closed:
            return []
        self._step("fail")
        self.reason = reason
        actions: list[ev.Action] = []
        if send_cancel and self.peer is not PeerPhase.SILENT:
            actions.append(ev.Send(msg.Cancel(self.key, reason, message[:2000])))
        return actions + self.copies.cancel() + self._release_if_quiet()

    def _release_if_quiet(self, peer_quiet: bool = False) -> list[ev.Action]:
        """`peer_quiet`: D provably reads no more."""
        waits = self.copies.outstanding if self.phase is Phase.STOPPING else not peer_quiet
        if waits or not self.closing:
            return []
        self._step("quiet")
        self._forget()
        answer: list[ev.Action] = []
        if self.peer is not PeerPhase.SILENT:
            answer = [ev.Send(msg.Cancelled(self.key, self.reason))]
        return answer + self._release(self.reason)

    def _forget(self) -> None:
        # A tombstone answers until its ticket expires.
        self._ticket, self._register, self._offer = "", None, None
        self._ranges.forget()
        self._trim_history()

    def _reply(self) -> list[ev.Action]:
        return self._answer() if self.closed else self._repeat()

    def _answer(self) -> list[ev.Action]:
        if self.closed or self.phase in AWAITING:
            return [ev.Send(msg.Cancelled(self.key, self.reason))]
        return []

    def _repeat(self) -> list[ev.Action]:
        if self.phase in _OFFERED and self._offer is not None:
            return [ev.Send(self._offer)]
        if self.phase in AWAITING:
            return [ev.Send(msg.Cancel(self.key, self.reason))]
        return []

    def _release(self, outcome: str) -> list[ev.Action]:
        if self.released:
            return []
        self._engine_step("release")
        self.reason = outcome
        # An engine that has not opened the attempt holds no pages, and is notified when it does.
        return [ev.Notify(ev.PrefillReleased(self.key, outcome))] if self.opened else []
