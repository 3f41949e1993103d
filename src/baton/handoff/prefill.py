"""P's half of one attempt as a pure state machine: events in, actions out.

Push: P copies each newly final stretch once D has registered, COMMITs when all copies are done, and frees
on ACK. Pull: P offers READY when its prefill is over, D reads and says READ_DONE, P CONFIRMs and frees on
ACK.

Freeing: only the issuer of copies can prove that memory is quiet. In push that is P itself; in pull P waits
for ACK, CANCELLED, or the proof that D can read no more. A deadline alone frees nothing that D may still
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal

from baton.errors import ProtocolError
from baton.handoff.events import (
    Abort,
    Action,
    CopyEnded,
    CopyLedger,
    Deadline,
    Declared,
    MachineEvent,
    Notify,
    Opened,
    PeerLost,
    PrefillReleased,
    Received,
    Sampled,
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
    ReadDone,
    Ready,
    Register,
    Seeds,
)


class PrefillPhase(Enum):
    """Where P's half of an attempt is."""

    OPEN = "open"  # prefilling, or waiting for REGISTER
    OFFERED = "offered"  # COMMIT, READY, CONFIRM or FINISHED sent and repeated until answered
    CLOSING = "closing"  # failed; waiting until the pages are quiet
    CLOSED = "closed"  # nothing left to do


class PrefillHandoff:
    """State machine of P for one attempt. It may begin with `Opened` or with a REGISTER.

    `groups` are the names of P's groups. `handle` raises `ProtocolError` for a REGISTER that contradicts
    them; the attempt is then as before.
    """

    def __init__(self, key: AttemptKey, mode: Literal["push", "pull"], groups: Sequence[str]) -> None:
        self.key = key
        self.mode = mode
        self.groups = frozenset(groups)
        self.phase = PrefillPhase.OPEN
        self.opened = False
        self.released = False
        self.reason = ""
        self.copies = CopyLedger()
        self.registered = False
        self._known = False  # D has spoken, so it may wait for an answer
        self._register: Register | None = None
        self._prompt_len = 0
        self._pages: dict[str, list[int]] = {}
        self._final: dict[str, int] = dict.fromkeys(groups, 0)
        self._sent: dict[str, int] = {}
        self._seeds: Seeds | None = None
        self._finished = False
        self._offer: AttemptMessage | None = None
        self._exposed = False  # pull: D knows the pages, and may be reading them
        self._peer_quiet = False

    @property
    def closed(self) -> bool:
        """True when the machine can be replaced by its terminal reply."""
        return self.phase is PrefillPhase.CLOSED

    def handle(self, event: MachineEvent) -> list[Action]:
        """Take one event; the actions are to be carried out in order."""
        match event:
            case Opened():
                self.opened = True
                return self._notify_released() if self.released else self._advance()
            case Received(message):
                return self._receive(message)
            case Declared():
                return self._declare(event)
            case Sampled(seeds, finished):
                if self.phase is not PrefillPhase.OPEN or self._seeds is not None:
                    return []
                self._seeds, self._finished = seeds, finished
                self._final = {group: max(end, self._prompt_len) for group, end in self._final.items()}
                return self._advance()
            case CopyEnded():
                return self._copy_ended(event)
            case Abort(reason, message):
                return self._fail(reason, message)
            case Deadline():
                return self._fail("handoff_timeout", "the handoff did not end before its ticket expired")
            case PeerLost(reason, message, fenced):
                self._peer_quiet = self._peer_quiet or fenced
                return self._fail(reason, message) or self._settle()
            case Tick():
                return self._repeat()
            case _:
                return []

    # ------------------------------------------------------------ messages

    def _receive(self, message: AttemptMessage) -> list[Action]:
        self._known = True
        match message:
            case Register():
                return self._registered(message)
            case ReadDone() if self._exposed and self.phase is PrefillPhase.OFFERED:
                assert self._seeds is not None
                return self._make_offer(Confirm(self.key, self._seeds))
            case Ack():
                return self._acknowledged()
            case Cancel(_, reason, text):
                # A failed copy may have closed the attempt already: D's question still needs its answer.
                return self._fail(reason, text, tell=False) or self._answer()
            case Cancelled(_, reason):
                self._peer_quiet = True
                return self._fail(reason, "cancelled by the decode side", tell=False) or self._settle()
            case _:
                return []

    def _registered(self, message: Register) -> list[Action]:
        if self.registered:
            return self._repeat() or self._answer()
        if set(message.wanted) != self.groups:
            raise ProtocolError(f"REGISTER names groups {sorted(message.wanted)}, here {sorted(self.groups)}")
        if self.mode == "push" and set(message.pages) != self.groups:
            raise ProtocolError("REGISTER for push must bring a block table for each group")
        self.registered = True
        if self.phase is not PrefillPhase.OPEN:
            # The attempt failed before D came; it learns so at once.
            return self._answer()
        self._register = message
        self._sent = {group: start for group, (start, _) in message.wanted.items()}
        return self._advance()

    def _acknowledged(self) -> list[Action]:
        if self._offer is None or isinstance(self._offer, Ready):
            return []  # nothing was committed that could be acknowledged
        # Also when a deadline overtook the ACK: D has committed, and reads no more.
        self._peer_quiet = True
        if self.phase is PrefillPhase.OFFERED:
            self._close()
            return self._release("finished" if self._finished else "committed")
        return self._settle()

    # ------------------------------------------------------------ progress

    def _declare(self, event: Declared) -> list[Action]:
        if self.phase is not PrefillPhase.OPEN or self._seeds is not None:
            return []
        self._prompt_len = event.prompt_len
        for group, pages in event.pages.items():
            self._pages[group] = list(pages)
        for group, end in event.final.items():
            self._final[group] = max(self._final.get(group, 0), min(end, event.prompt_len))
        return self._advance()

    def _advance(self) -> list[Action]:
        if self.phase is not PrefillPhase.OPEN or not self.opened:
            return []
        if self._finished:
            return self._finish()
        if self._register is None:
            return []
        wanted = self._register.wanted
        if self._seeds is not None:
            beyond = [group for group, (_, stop) in wanted.items() if stop > self._final[group]]
            if beyond:
                return self._fail("not_final", f"groups {beyond} are wanted beyond the prompt's end")
        if self.mode == "push":
            return self._push(self._register)
        if self._seeds is None:
            return []
        self._exposed = True
        return self._make_offer(Ready(self.key, final=self._final, pages=self._pages))

    def _push(self, register: Register) -> list[Action]:
        actions: list[Action] = []
        for group in sorted(register.wanted):
            start, stop = self._sent[group], min(register.wanted[group][1], self._final[group])
            if start < stop:
                self._sent[group] = stop
                source = self._pages.get(group, [])
                dest = register.pages[group]
                actions.append(StartCopy(self.copies.start(), group, start, stop, source, dest))
        if self._seeds is not None and not self.copies.outstanding:
            commit = Commit(
                self.key,
                final=self._final,
                seeds=self._seeds,
                num_bytes=self.copies.num_bytes,
                num_runs=self.copies.num_runs,
            )
            actions += self._make_offer(commit)
        return actions

    def _finish(self) -> list[Action]:
        """The request ended with its first token: stop copying, free, and tell D once it has registered."""
        if self.copies.outstanding:
            return self.copies.cancel()
        actions = self._release("finished")
        if self._register is None:
            return actions
        assert self._seeds is not None
        return actions + self._make_offer(Finished(self.key, self._seeds))

    def _make_offer(self, offer: AttemptMessage) -> list[Action]:
        self.phase, self._offer = PrefillPhase.OFFERED, offer
        return [Send(offer)]

    def _copy_ended(self, event: CopyEnded) -> list[Action]:
        if not self.copies.end(event):
            return []
        if self.phase is PrefillPhase.CLOSING:
            return self._settle()
        if not event.ok and not self._finished:
            return self._fail("transfer_failed", event.message)
        return [] if self.copies.outstanding and self._finished else self._advance()

    # ------------------------------------------------------------ the end

    def _fail(self, reason: str, message: str, tell: bool = True) -> list[Action]:
        if self.phase in (PrefillPhase.CLOSING, PrefillPhase.CLOSED):
            return []
        self.phase, self.reason = PrefillPhase.CLOSING, reason
        actions: list[Action] = []
        if tell and self._known:
            actions.append(Send(Cancel(self.key, reason, message[:2000])))
        return actions + self.copies.cancel() + self._settle()

    def _settle(self) -> list[Action]:
        """Free and answer as soon as the pages are quiet."""
        if self.phase is not PrefillPhase.CLOSING or self.copies.outstanding:
            return []
        if self._exposed and not self._peer_quiet:
            return []
        self._close()
        answer: list[Action] = [Send(Cancelled(self.key, self.reason))] if self._known else []
        return answer + self._release(self.reason)

    def _close(self) -> None:
        # What is left is a tombstone, which answers until its ticket has expired: let go of the tables.
        self.phase, self._register, self._pages = PrefillPhase.CLOSED, None, {}

    def _answer(self) -> list[Action]:
        """Say CANCELLED again where P's own copies have ended, whatever D still does."""
        if self.phase in (PrefillPhase.OPEN, PrefillPhase.OFFERED) or self.copies.outstanding:
            return []
        return [Send(Cancelled(self.key, self.reason))]

    def _repeat(self) -> list[Action]:
        if self.phase is PrefillPhase.OFFERED and self._offer is not None:
            return [Send(self._offer)]
        if self.phase is PrefillPhase.CLOSING and self._exposed:
            return [Send(Cancel(self.key, self.reason))]
        return []

    def _release(self, outcome: str) -> list[Action]:
        if self.released:
            return []
        self.released, self.reason = True, outcome
        return self._notify_released()

    def _notify_released(self) -> list[Action]:
        # An engine that has not opened the attempt holds no pages for it; it is told when it does.
        return [Notify(PrefillReleased(self.key, self.reason))] if self.opened else []
