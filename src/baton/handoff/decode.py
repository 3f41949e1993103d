"""D's half of one attempt as a pure state machine: events in, actions out.

D registers, and is committed by COMMIT (push) or by CONFIRM after its reads (pull), never by a timeout or a
count of its own. FINISHED says that nothing is left to decode.

Freeing: in push P writes D's pages, so that after a failure they wait for COMMIT, FINISHED, CANCELLED, or
the proof that P can write no more. In pull only D's own reads touch them. Whatever was never asked for is
free at once.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from baton.handoff.events import (
    Abort,
    Action,
    CopyEnded,
    CopyLedger,
    Deadline,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeReleased,
    MachineEvent,
    Notify,
    PeerLost,
    PeerReady,
    Received,
    Send,
    StartCopy,
    Tick,
)
from baton.handoff.messages import (
    Ack,
    AttemptKey,
    AttemptMessage,
    Cancel,
    Cancelled,
    Commit,
    Confirm,
    Finished,
    Nack,
    ReadDone,
    Ready,
    Register,
)


class DecodePhase(Enum):
    """Where D's half of an attempt is."""

    WAITING = "waiting"  # no session with P yet: nothing was sent
    REGISTERED = "registered"  # REGISTER sent
    READING = "reading"  # pull: own reads outstanding
    READ = "read"  # pull: READ_DONE sent
    CLOSING = "closing"  # failed; waiting until the pages are quiet
    FAILED = "failed"  # failed, and released
    DONE = "done"  # committed or finished


_WANTS_PEER = (DecodePhase.REGISTERED, DecodePhase.READING, DecodePhase.READ)


class DecodeHandoff:
    """State machine of D for one attempt.

    `wanted` are the intervals `[start, stop)` D needs per group, `pages` its block tables (exclusive to
    this attempt where wanted), `ticket` the router's signed ticket that REGISTER carries.
    """

    def __init__(
        self,
        key: AttemptKey,
        mode: Literal["push", "pull"],
        ticket: str,
        wanted: dict[str, tuple[int, int]],
        pages: dict[str, list[int]],
    ) -> None:
        self.key = key
        self.mode = mode
        self.phase = DecodePhase.WAITING
        self.reason = ""
        self.copies = CopyLedger()
        self._wanted = dict(wanted)
        self._pages = {group: list(table) for group, table in pages.items()}
        # P learns D's pages only where it has to write them.
        tables = self._pages if mode == "push" else {}
        self._farewell: AttemptMessage | None = None
        self._pending: AttemptMessage | None = Register(key, ticket=ticket, wanted=self._wanted, pages=tables)

    @property
    def closed(self) -> bool:
        """True when only late messages are left to answer."""
        return self.phase in (DecodePhase.FAILED, DecodePhase.DONE)

    def handle(self, event: MachineEvent) -> list[Action]:
        """Take one event; the actions are to be carried out in order."""
        match event:
            case PeerReady():
                if self.phase is DecodePhase.WAITING:
                    self.phase = DecodePhase.REGISTERED
                if self._farewell is not None:
                    farewell, self._farewell = self._farewell, None
                    return [Send(farewell)]
                return self._repeat()
            case Received(message):
                return self._receive(message)
            case CopyEnded():
                return self._copy_ended(event)
            case Abort(reason):
                return self._fail(reason, "", notify=False)
            case Deadline():
                return self._fail("handoff_timeout", "the handoff did not end before its ticket expired")
            case PeerLost(reason, message, fenced):
                actions = self._fail(reason, message, tell=False)
                return actions + (self._settle(peer_quiet=True) if fenced else [])
            case Tick():
                return [] if self.phase is DecodePhase.WAITING else self._repeat()
            case _:
                return []

    # ------------------------------------------------------------ messages

    def _receive(self, message: AttemptMessage) -> list[Action]:
        match message:
            case Commit() | Finished() | Confirm() if self.phase is DecodePhase.DONE:
                return [Send(Ack(self.key))]
            case Commit() if self.mode == "push":
                return self._committed(message)
            case Ready() if self.mode == "pull":
                return self._ready(message)
            case Confirm() if self.phase is DecodePhase.READ:
                return self._commit(message, self.copies.num_bytes, self.copies.num_runs)
            case Finished():
                return self._finished(message)
            case Nack(_, reason, text):
                return self._fail(reason, text)
            case Cancel(_, reason, text):
                if self.phase is DecodePhase.DONE:
                    return [Send(Ack(self.key))]
                return self._fail(reason, text, tell=False) or self._answer()
            case Cancelled(_, reason):
                actions = self._fail(reason, "cancelled by the prefill side", tell=False)
                return actions + self._settle(peer_quiet=True)
            case _:
                return self._answer()

    def _committed(self, message: Commit) -> list[Action]:
        # P sends COMMIT only when all its copies are done, so the pages are quiet whatever comes of it.
        if self.phase is DecodePhase.REGISTERED:
            missing = self._missing(message.final)
            if not missing:
                return self._commit(message, message.num_bytes, message.num_runs)
            text = f"COMMIT does not cover groups {missing}"
            actions = self._fail("incomplete_commit", text, tell=False)
            return actions + self._settle(peer_quiet=True)
        return self._settle(peer_quiet=True) or self._answer()

    def _commit(self, message: Commit | Confirm, num_bytes: int, num_runs: int) -> list[Action]:
        self._close(DecodePhase.DONE)
        return [Send(Ack(self.key)), Notify(DecodeCommitted(self.key, message.seeds, num_bytes, num_runs))]

    def _ready(self, message: Ready) -> list[Action]:
        if self.phase is not DecodePhase.REGISTERED:
            # After a failure P still has to hear that no read of D's is left.
            return self._repeat() if self.phase is DecodePhase.READ else self._answer()
        missing = self._missing(message.final)
        if missing or not set(self._wanted) <= set(message.pages):
            return self._fail("incomplete_commit", f"READY does not cover groups {missing or 'of REGISTER'}")
        self.phase, self._pending = DecodePhase.READING, None
        actions: list[Action] = []
        for group, (start, stop) in sorted(self._wanted.items()):
            if start < stop:
                source, dest = message.pages[group], self._pages[group]
                actions.append(StartCopy(self.copies.start(), group, start, stop, source, dest))
        return actions or self._read_done()

    def _missing(self, final: dict[str, int]) -> list[str]:
        return sorted(group for group, (_, stop) in self._wanted.items() if final.get(group, -1) < stop)

    def _finished(self, message: Finished) -> list[Action]:
        if self.phase is DecodePhase.REGISTERED:
            self._close(DecodePhase.DONE)
            return [Send(Ack(self.key)), Notify(DecodeFinished(self.key, message.seeds))]
        # P sends FINISHED with none of its copies outstanding.
        return self._settle(peer_quiet=True) or self._answer()

    # ------------------------------------------------------------ progress and end

    def _read_done(self) -> list[Action]:
        self.phase, self._pending = DecodePhase.READ, ReadDone(self.key)
        return [Send(self._pending)]

    def _copy_ended(self, event: CopyEnded) -> list[Action]:
        if not self.copies.end(event):
            return []
        if self.phase is DecodePhase.CLOSING:
            return self._settle()
        if not event.ok:
            return self._fail("transfer_failed", event.message)
        return [] if self.copies.outstanding else self._read_done()

    def _fail(self, reason: str, message: str, tell: bool = True, notify: bool = True) -> list[Action]:
        """End the attempt: report it, stop own copies, and free what is quiet already."""
        if self.phase is DecodePhase.CLOSING or self.closed:
            return []
        asked = self.phase in _WANTS_PEER
        self.phase, self.reason = DecodePhase.CLOSING, reason
        cancel = Cancel(self.key, reason, message[:2000])
        # Never asked, P may still be holding pages for this attempt: it is told when it can be.
        self._pending, self._farewell = (cancel, None) if asked else (None, cancel)
        actions: list[Action] = [Notify(DecodeFailed(self.key, reason, message))] if notify else []
        if tell and self._pending is not None:
            actions.append(Send(self._pending))
        return actions + self.copies.cancel() + self._settle(peer_quiet=not asked)

    def _settle(self, peer_quiet: bool = False) -> list[Action]:
        """Free when nothing can write D's pages: in pull own reads, in push P's copies."""
        if self.phase is not DecodePhase.CLOSING or self.copies.outstanding:
            return []
        if self.mode == "push" and not peer_quiet:
            return []
        asked = self._pending is not None
        self._close(DecodePhase.FAILED)
        answer: list[Action] = [Send(Cancelled(self.key, self.reason))] if asked else []
        return [*answer, Notify(DecodeReleased(self.key))]

    def _answer(self) -> list[Action]:
        """Tell P, in any state after a failure, once none of D's own copies is left."""
        failed = self.phase in (DecodePhase.CLOSING, DecodePhase.FAILED)
        return [Send(Cancelled(self.key, self.reason))] if failed and not self.copies.outstanding else []

    def _close(self, phase: DecodePhase) -> None:
        self.phase, self._pending, self._pages = phase, None, {}

    def _repeat(self) -> list[Action]:
        return [Send(self._pending)] if self._pending is not None and not self.closed else []
