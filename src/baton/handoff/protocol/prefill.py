"""P's state machine for one attempt. Pure: events in, actions out.

Push: once D has registered, P copies each newly final interval, sends COMMIT when all copies are done, copies bad
pieces again (REPAIR), and frees on ACK. Pull: P sends READY after its prefill, D reads and sends READ_DONE, P sends
CONFIRM and frees on ACK. With integrity on, each final interval is digested as it is copied.

Freeing: only the side that issues copies can prove that memory is quiet. In pull, P waits for ACK, CANCELLED, or proof
that D can read no more. A deadline alone frees nothing that D may still read.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.attempt_machine import AttemptMachine
from baton.handoff.protocol.digests import seeds_digest
from baton.handoff.protocol.final_ranges import FinalRanges
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.phases import PrefillPhase
from baton.wire import Integrity, Mode


class PrefillHandoff(AttemptMachine):
    """State machine of P for one attempt. It begins with `Opened`, ANNOUNCE or REGISTER.

    `ticket`: the router's, with which P's engine or D began the attempt. `groups`: those whose bytes this pair of ranks
    moves; all of P's rank until D's instance is known.

    `handle` raises `ProtocolError` for an ANNOUNCE or REGISTER with another ticket, a REGISTER that contradicts
    `groups`, and a REPAIR of tokens that were not wanted; the attempt is then unchanged.
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
        self.phase = PrefillPhase.OPEN
        self.opened = False
        self.admitted = False
        self.announced = False
        self.released = False
        self.registered = False
        self._known = False  # D has sent a message, so it may wait for an answer
        self._register: msg.Register | None = None
        self._ranges = FinalRanges(key, mode, integrity, self.copies)
        self._seeds: msg.Seeds | None = None
        self._finished = False
        self._offer: msg.AttemptMessage | None = None
        self._exposed = False  # pull: D knows the pages, and may be reading them
        self._peer_quiet = False

    @property
    def closing(self) -> bool:
        """Failed, and not proven quiet."""
        return self.phase is PrefillPhase.CLOSING

    @property
    def closed(self) -> bool:
        """True when the machine can be replaced by its terminal reply."""
        return self.phase is PrefillPhase.CLOSED

    def begun_with(self, ticket: str) -> bool:
        """Whether this attempt began with `ticket`. A closed attempt has dropped its ticket and accepts any: it only
        answers how it ended."""
        return self.closed or ticket == self._ticket

    def handle(self, event: ev.MachineEvent) -> list[ev.Action]:
        """The actions must be carried out in order."""
        match event:
            case ev.Opened():
                self.opened = True
                return self._notify_released() if self.released else self._advance()
            case ev.PagesGiven():
                self.admitted = True
                return self._say_admitted()
            case ev.Received(message):
                return self._receive(message)
            case ev.Declared() | ev.LayersWritten() | ev.LayersWithdrawn():
                return self._declare(event)
            case ev.Sampled(seeds, finished, final):
                if self.phase is not PrefillPhase.OPEN or self._seeds is not None:
                    return []
                self._seeds, self._finished = seeds, finished
                self._ranges.extend(final)
                return self._advance()
            case ev.CopyEnded():
                return self._copy_ended(event)
            case ev.DigestsComputed():
                return self._digested(event)
            case ev.Abort(reason, message) | ev.Fault(reason, message):
                return self._fail(reason, message)
            case ev.Deadline(message):
                return self._fail("handoff_timeout", message)
            case ev.PeerLost(reason, message, fenced):
                self._peer_quiet = self._peer_quiet or fenced
                return self._fail(reason, message) or self._settle()
            case ev.Tick():
                return self._repeat()
            case _:
                return []

    # ------------------------------------------------------------ messages

    def _receive(self, message: msg.AttemptMessage) -> list[ev.Action]:
        if isinstance(message, msg.Announce | msg.Register) and not self.begun_with(message.ticket):
            raise ProtocolError("the ticket is not the one by which this attempt began")
        self._known = True
        match message:
            case msg.Announce():
                self.announced = True
                # The request may have ended with its first token before D's ANNOUNCE.
                return self._say_admitted() or self._advance() or self._repeat() or self._answer()
            case msg.Register():
                return self._registered(message)
            case msg.ReadDone() if self._exposed and self.phase is PrefillPhase.OFFERED:
                assert self._seeds is not None
                return self._make_offer(msg.Confirm(self.key, self._seeds, self._seeds_digest(self._seeds)))
            case msg.ReadDone():
                return self._answer()
            case msg.Repair():
                return self._repair(message)
            case msg.Ack():
                return self._acknowledged()
            case msg.Cancel(_, reason, text):
                # A failed copy may have closed the attempt already, and D's CANCEL still needs an answer.
                return self._fail(reason, text, tell=False) or self._answer()
            case msg.Cancelled(_, reason):
                self._peer_quiet = True
                return self._fail(reason, "cancelled by the decode side", tell=False) or self._settle()
            case _:
                return []

    def _say_admitted(self) -> list[ev.Action]:
        waits = self.announced and not self.registered and self.phase is PrefillPhase.OPEN and not self._finished
        return [ev.Send(msg.Admitted(self.key))] if self.admitted and waits else []

    def _registered(self, message: msg.Register) -> list[ev.Action]:
        if self.registered:
            return self._repeat() or self._answer()
        if set(message.wanted) != self.groups:
            raise ProtocolError(f"REGISTER names groups {sorted(message.wanted)}, here {sorted(self.groups)}")
        if self.mode == "push" and set(message.pages) != self.groups:
            raise ProtocolError("REGISTER for push must bring a block table for each group")
        self.registered = True
        if self.phase is not PrefillPhase.OPEN:
            # The attempt ended before D registered: tell D at once.
            return self._repeat() or self._answer()
        self._register = message
        self._ranges.begin(message)
        return self._advance()

    def _acknowledged(self) -> list[ev.Action]:
        if self._offer is None or isinstance(self._offer, msg.Ready):
            return []  # nothing was committed
        # An ACK after a deadline frees too: D has committed, and reads no more.
        self._peer_quiet = True
        if self.phase is PrefillPhase.OFFERED:
            self._close()
            return self._release("finished" if self._finished else "committed")
        return self._settle()

    # ------------------------------------------------------------ progress

    def _declare(self, event: ev.Declared | ev.LayersWritten | ev.LayersWithdrawn) -> list[ev.Action]:
        if self.phase is not PrefillPhase.OPEN or self._seeds is not None:
            return []
        match event:
            case ev.Declared():
                self._ranges.declare(event)
            case ev.LayersWritten():
                self._ranges.written(event)
            case ev.LayersWithdrawn():
                self._ranges.withdraw()
        return self._advance()

    def _advance(self) -> list[ev.Action]:
        if self.phase is not PrefillPhase.OPEN or not self.opened:
            return []
        if self._finished:
            return self._finish()
        if self._register is None:
            return []
        if self._seeds is not None and (beyond := self._ranges.beyond(self._register)):
            return self._fail("not_final", f"groups {beyond} are wanted beyond the prompt's end")
        actions = self._ranges.follow(self._register)
        if self._seeds is None or not self._ranges.at_rest:
            return actions
        if self.mode == "push":
            return actions + self._make_offer(self._commit(self._seeds))
        self._exposed = True
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
        if self.phase is not PrefillPhase.OPEN:
            return []
        copies = self._ranges.digested(event)
        return self._advance() or [action for copy in copies for action in self._progress(copy)]

    def _repair(self, message: msg.Repair) -> list[ev.Action]:
        """A REPAIR that was carried out already is answered by its COMMIT."""
        if self.phase is not PrefillPhase.OFFERED or not isinstance(self._offer, msg.Commit):
            return self._answer()
        if message.round <= self.round:
            return self._repeat()
        assert self._register is not None
        if message.round != self.round + 1:
            raise ProtocolError(f"REPAIR of round {message.round} after round {self.round}")
        if self.round == self.max_retries:
            return self._fail("integrity_failed", f"still bad after {self.round} repairs")
        copies = self._ranges.again(self._register, message)
        self.phase, self._offer, self.round = PrefillPhase.OPEN, None, message.round
        return [ev.Count("repairs"), *copies, *self._advance()]

    def _finish(self) -> list[ev.Action]:
        """The request ended with its first token: stop copying, free, and tell D if it has announced or registered."""
        if self.copies.outstanding:
            return self.copies.cancel()
        actions = self._release("finished")
        if not (self.announced or self.registered):
            return actions
        assert self._seeds is not None
        return actions + self._make_offer(msg.Finished(self.key, self._seeds))

    def _make_offer(self, offer: msg.AttemptMessage) -> list[ev.Action]:
        self.phase, self._offer = PrefillPhase.OFFERED, offer
        return [ev.Send(offer)]

    def _copy_ended(self, event: ev.CopyEnded) -> list[ev.Action]:
        copy = self.copies.end(event)
        if copy is None:
            return []
        if not self._ranges.computed:
            self.copies.num_hidden += event.num_bytes
        if self.phase is PrefillPhase.CLOSING:
            return self._settle()
        if self._finished:
            return [] if self.copies.outstanding else self._advance()
        if not event.ok:
            return self.copies.again(copy) or self._fail("transfer_failed", event.message)
        # A COMMIT makes PROGRESS redundant.
        return self._advance() or self._progress(copy)

    def _progress(self, copy: ev.StartCopy) -> list[ev.Action]:
        # After a REPAIR, D ignores PROGRESS, and the next COMMIT covers everything.
        return [] if self.round else self._ranges.progress(copy)

    # ------------------------------------------------------------ the end

    def _fail(self, reason: str, message: str, tell: bool = True) -> list[ev.Action]:
        if self.phase in (PrefillPhase.CLOSING, PrefillPhase.CLOSED):
            return []
        self.phase, self.reason = PrefillPhase.CLOSING, reason
        actions: list[ev.Action] = []
        if tell and self._known:
            actions.append(ev.Send(msg.Cancel(self.key, reason, message[:2000])))
        return actions + self.copies.cancel() + self._settle()

    def _settle(self) -> list[ev.Action]:
        if self.phase is not PrefillPhase.CLOSING or self.copies.outstanding:
            return []
        if self._exposed and not self._peer_quiet:
            return []
        self._close()
        answer: list[ev.Action] = [ev.Send(msg.Cancelled(self.key, self.reason))] if self._known else []
        return answer + self._release(self.reason)

    def _close(self) -> None:
        # What remains is a tombstone that answers until its ticket expires: drop tables and texts.
        self.phase, self._ticket, self._register, self._offer = PrefillPhase.CLOSED, "", None, None
        self._ranges.forget()

    def _answer(self) -> list[ev.Action]:
        """Repeat CANCELLED if P's own copies have ended, whatever D still does."""
        if self.phase in (PrefillPhase.OPEN, PrefillPhase.OFFERED) or self.copies.outstanding:
            return []
        return [ev.Send(msg.Cancelled(self.key, self.reason))]

    def _repeat(self) -> list[ev.Action]:
        if self.phase is PrefillPhase.OFFERED and self._offer is not None:
            return [ev.Send(self._offer)]
        if self.phase is PrefillPhase.CLOSING and self._exposed:
            return [ev.Send(msg.Cancel(self.key, self.reason))]
        return []

    def _release(self, outcome: str) -> list[ev.Action]:
        if self.released:
            return []
        self.released, self.reason = True, outcome
        return self._notify_released()

    def _notify_released(self) -> list[ev.Action]:
        # An engine that has not opened the attempt holds no pages for it. It is notified when it opens the attempt.
        return [ev.Notify(ev.PrefillReleased(self.key, self.reason))] if self.opened else []
