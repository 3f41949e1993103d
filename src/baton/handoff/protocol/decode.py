"""D's state machine for one attempt. Pure: events in, actions out. docs/protocol.md has its phases, and when pages are
freed.

A COMMIT before REGISTER proves nothing, because P may still get the REGISTER.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.decode_state import UNPLACED, UNREACHED, DecodeState
from baton.handoff.protocol.digest_checks import DigestChecks, digested_tokens
from baton.handoff.protocol.digests import check_shape, groups_without_digests, seeds_digest
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.phases import DecodePhase as Phase
from baton.kv.interval import Interval
from baton.wire import Integrity, Mode

_BAD_SEEDS = "the seeds do not match their digest"


class DecodeHandoff(DecodeState):
    """`pages`: D's block tables, exclusive to this attempt in `wanted`. Without them the attempt is announced, and they
    come with `Placed`.

    `handle` raises `ProtocolError` for digests outside `wanted` and for an event that the table does not define; the
    attempt is then unchanged.
    """

    def __init__(
        self,
        key: AttemptKey,
        mode: Mode,
        ticket: str,
        wanted: dict[str, Interval] | None = None,
        pages: dict[str, list[int]] | None = None,
        max_retries: int = 3,
        integrity: Integrity = "off",
    ) -> None:
        super().__init__(key, mode, max_retries, integrity)
        self._ticket = ticket
        self._groups: frozenset[str] | None = None
        self._wanted: dict[str, Interval] = {}
        self._pages: dict[str, list[int]] = {}
        self._digest_checks = DigestChecks({}, {})
        self._proven: dict[str, int] = {}
        self._source: Mapping[str, list[int]] = {}  # pull: P's block tables
        self._claim: msg.Commit | msg.Ready | None = None  # the message whose digests are being checked
        self._pending: msg.AttemptMessage | None = msg.Announce(key, ticket)
        if wanted is not None:
            self._place(wanted, pages or {})

    def handle(self, event: ev.MachineEvent) -> list[ev.Action]:
        name = self._enter(event)
        match event:
            case ev.PeerReady(groups):
                return self._reached(groups)
            case ev.Placed(wanted, pages):
                return self._placed(wanted, pages)
            case ev.Received(message):
                return self._receive(message)
            case ev.CopyEnded():
                return self._copy_ended(event)
            case ev.DigestsChecked():
                return self._checked(event)
            case ev.Fault(reason, message):
                return self._fail(reason, message)
            case ev.Abort(reason):
                return self._fail(reason, "", notify=False)
            case ev.Deadline(message):
                return self._fail("handoff_timeout", message)
            case ev.PeerLost(reason, message, fenced):
                return self._fail(reason, message, send_cancel=False) + self._release_if_quiet(peer_quiet=fenced)
            case ev.Tick():
                return self._repeat()
        raise AssertionError(f"{name} is in the table and has no handler")

    def _reached(self, groups: frozenset[str] | None) -> list[ev.Action]:
        """A session with P is open, the first or a later one."""
        self._groups = groups
        if self.phase is Phase.CANCEL_DUE:
            self._step("reach")
            farewell, self._pending = self._pending, None
            assert farewell is not None
            return [ev.Send(farewell)]
        if self.phase in UNREACHED:
            self._step("reach")
        return self._repeat()

    def _place(self, wanted: dict[str, Interval], pages: dict[str, list[int]]) -> None:
        self._step("place")
        self._wanted = dict(wanted)
        self._pages = dict(pages)
        self._digest_checks = DigestChecks(self._wanted, self._pages)
        tables = self._pages if self.mode == "push" else {}
        self._pending = msg.Register(self.key, ticket=self._ticket, wanted=self._wanted, pages=tables)

    def _placed(self, wanted: dict[str, Interval], pages: dict[str, list[int]]) -> list[ev.Action]:
        """Register. If the attempt has failed, P does not know the pages: they are free."""
        if self.phase not in UNPLACED:
            return []
        self._place(wanted, pages)
        return self._repeat()

    def _receive(self, message: msg.AttemptMessage) -> list[ev.Action]:
        match message:
            case msg.Commit() | msg.Finished() | msg.Confirm() | msg.Cancel() if self.phase is Phase.DONE:
                return [ev.Send(msg.Ack(self.key))]
            case msg.Admitted():
                return self._admit()
            case msg.Progress() if self.mode == "push":
                return self._progress(message)
            case msg.Commit() if self.mode == "push":
                return self._committed(message)
            case msg.Ready() if self.mode == "pull":
                return self._ready(message)
            case msg.Confirm() if self.phase is Phase.READ:
                return self._confirmed(message)
            case msg.Finished():
                return self._finished(message)
            case msg.Nack(_, reason, text):
                return self._fail(reason, text)
            case msg.Cancel() if self.closing or self.closed:
                return self._answer()
            case msg.Cancel(_, reason, text):
                return self._fail(reason, text, send_cancel=False)
            case msg.Cancelled(_, reason):
                actions = self._fail(reason, "cancelled by the prefill side", send_cancel=False)
                return actions + self._release_if_quiet(peer_quiet=True)
            case _:
                return self._answer()

    def _admit(self) -> list[ev.Action]:
        if self.phase is not Phase.ANNOUNCED:
            return self._answer()
        self._step("admit")
        return [ev.Notify(ev.DecodeAdmitted(self.key, self._groups))]

    def _progress(self, message: msg.Progress) -> list[ev.Action]:
        # After a REPAIR, copies overwrite pieces that an earlier PROGRESS reported as done.
        if self.phase is not Phase.REGISTERED or self.integrity == "off":
            return self._answer()
        check_shape(message.digests, self._wanted)
        return self._digest_checks.check(message.digests)

    def _committed(self, message: msg.Commit) -> list[ev.Action]:
        # All copies of P were done, but a later REPAIR may have started new ones.
        current = message.round == self.round
        if self.phase is Phase.CLOSING and current:
            return self._release_if_quiet(peer_quiet=True)
        if self.phase not in (Phase.REGISTERED, Phase.REPAIRING):
            return self._answer()
        if not current:
            return []
        refused = self._refusal(message)
        self._step("check")
        if refused:
            return self._fail("incomplete_commit", f"COMMIT {refused}", send_cancel=False)
        return self._check_digests(message)

    def _ready(self, message: msg.Ready) -> list[ev.Action]:
        if self.phase is Phase.READ:
            return self._repeat()
        if self.phase is not Phase.REGISTERED:
            return self._answer()
        refused = self._refusal(message)
        if refused or not set(self._wanted) <= set(message.pages):
            return self._fail("incomplete_commit", f"READY {refused or 'does not bring a block table of each group'}")
        self._claim, self._source = message, message.pages
        return self._read({group: [tokens] for group, tokens in self._wanted.items() if not tokens.empty})

    def _refusal(self, message: msg.Commit | msg.Ready) -> str:
        """What a COMMIT or READY lacks. Raises `ProtocolError`."""
        check_shape(message.digests, self._wanted)
        missing = sorted(group for group, tokens in self._wanted.items() if message.final.get(group, -1) < tokens.stop)
        if missing:
            return f"does not cover groups {missing}"
        missing = groups_without_digests(message.digests, self._wanted, self.integrity, self.key)
        return f"brings no digests of groups {missing}" if missing else ""

    def _finished(self, message: msg.Finished) -> list[ev.Action]:
        # P sends FINISHED only without outstanding copies.
        match self.phase:
            case Phase.ANNOUNCED | Phase.ADMITTED | Phase.REGISTERED | Phase.REPAIRING:
                self._step("finish")
                self._forget()
                return [ev.Send(msg.Ack(self.key)), ev.Notify(ev.DecodeFinished(self.key, message.seeds))]
            case Phase.WITHDRAWN | Phase.CLOSING:
                return self._release_if_quiet(peer_quiet=True)
            case _:
                return self._answer()

    def _confirmed(self, message: msg.Confirm) -> list[ev.Action]:
        if self._seeds_good(message):
            return self._commit(message, self.copies.num_bytes, self.copies.num_runs)
        if self.round == self.max_retries:
            return self._fail("integrity_failed", _BAD_SEEDS)
        self.round += 1
        return [ev.Count("repairs"), *self._repeat()]

    def _read(self, wanted: Mapping[str, list[Interval]]) -> list[ev.Action]:
        self._step("read")
        self._pending = None
        actions: list[ev.Action] = [
            self.copies.start(group, tokens, self._source[group], self._pages[group])
            for group, found in sorted(wanted.items())
            for tokens in found
        ]
        return actions if self.copies.outstanding else self._read_all()

    def _copy_ended(self, event: ev.CopyEnded) -> list[ev.Action]:
        copy = self.copies.end(event)
        if copy is None:
            return []
        if self.phase is Phase.STOPPING:
            return self._release_if_quiet()
        if event.ok:
            return [] if self.copies.outstanding else self._read_all()
        if self.copies.may_retry:
            return self.copies.retry(copy)
        return self._fail("transfer_failed", event.message)

    def _read_all(self) -> list[ev.Action]:
        assert self._claim is not None
        self._step("check")
        return self._check_digests(self._claim)

    def _check_digests(self, claim: msg.Commit | msg.Ready) -> list[ev.Action]:
        self._pending, self._claim = None, claim
        actions = self._digest_checks.check(claim.digests) if self.integrity != "off" else []
        return actions if self._digest_checks.checking else actions + self._decide(claim)

    def _checked(self, event: ev.DigestsChecked) -> list[ev.Action]:
        if not self._digest_checks.checked(event) or self.closed or self.closing:
            return []
        actions: list[ev.Action] = []
        proven = self._digest_checks.proven()
        if proven != self._proven:
            self._proven = proven
            actions.append(ev.Notify(ev.DecodeProgress(self.key, proven)))
        if self.phase is not Phase.CHECKING or self._digest_checks.checking:
            return actions
        assert self._claim is not None
        return actions + self._decide(self._claim)

    def _decide(self, claim: msg.Commit | msg.Ready) -> list[ev.Action]:
        bad = {} if self.integrity == "off" else self._digest_checks.unproven(claim.digests)
        seeds_good = isinstance(claim, msg.Ready) or self._seeds_good(claim)
        if not bad and seeds_good:
            if isinstance(claim, msg.Commit):
                return self._commit(claim, claim.num_bytes, claim.num_runs)
            self._step("read done")
            self._pending = msg.ReadDone(self.key)
            return [ev.Send(self._pending)]
        pieces, again = sum(map(len, bad.values())), digested_tokens(bad)
        # One REPAIR cannot name this many intervals, and merging them would overwrite proven tokens.
        scattered = any(len(found) > msg.MAX_REPAIRS for found in again.values())
        if self.round == self.max_retries or scattered:
            what = f"tokens {_text(again)} do not match their digests" if bad else _BAD_SEEDS
            return [ev.Count("bad_pieces", pieces), *self._fail("integrity_failed", what)]
        self.round += 1
        self._digest_checks.forget_checks()
        booked: list[ev.Action] = [ev.Count("bad_pieces", pieces), ev.Count("repairs")]
        if isinstance(claim, msg.Ready):
            return booked + self._read(again)
        self._step("repair")
        self._pending = msg.Repair(self.key, self.round, again)
        return [*booked, ev.Send(self._pending)]

    def _seeds_good(self, message: msg.Commit | msg.Confirm) -> bool:
        return self.integrity == "off" or message.seeds_digest == seeds_digest(self.key, message.seeds)

    def _commit(self, message: msg.Commit | msg.Confirm, num_bytes: int, num_runs: int) -> list[ev.Action]:
        self._step("commit")
        self._forget()
        return [ev.Send(msg.Ack(self.key)), ev.Notify(ev.DecodeCommitted(self.key, message.seeds, num_bytes, num_runs))]

    def _fail(self, reason: str, message: str, send_cancel: bool = True, notify: bool = True) -> list[ev.Action]:
        if self.closing or self.closed:
            return []
        self._step(f"fail ({self.mode})")
        self.reason, self._pending = reason, msg.Cancel(self.key, reason, message[:2000])
        failed = ev.DecodeFailed(self.key, reason, message, recoverable=reason not in ev.FINAL_REASONS)
        actions: list[ev.Action] = [ev.Notify(failed)] if notify else []
        if self.phase is Phase.CANCEL_DUE:
            # P may hold pages, so it gets CANCEL when reached.
            self._forget()
            return [*actions, ev.Notify(ev.DecodeReleased(self.key))]
        if send_cancel:
            actions.append(ev.Send(self._pending))
        return actions + self.copies.cancel() + self._release_if_quiet()

    def _release_if_quiet(self, peer_quiet: bool = False) -> list[ev.Action]:
        """`peer_quiet`: P provably writes no more."""
        # P may hold its own pages until it learns of the end.
        waits = self.copies.outstanding if self.phase is Phase.STOPPING else not peer_quiet
        if waits or not self.closing:
            return []
        self._step("quiet")
        self._forget()
        return [ev.Send(msg.Cancelled(self.key, self.reason)), ev.Notify(ev.DecodeReleased(self.key))]

    def _answer(self) -> list[ev.Action]:
        """After a failure, send CANCELLED once D has no outstanding copies."""
        failed = self.phase in (Phase.WITHDRAWN, Phase.CLOSING, Phase.CANCEL_DUE, Phase.FAILED)
        return [ev.Send(msg.Cancelled(self.key, self.reason))] if failed else []

    def _forget(self) -> None:
        # The tombstone answers until its ticket expires.
        self._pages, self._source, self._claim = {}, {}, None
        if self.phase is not Phase.CANCEL_DUE:
            self._pending = None
        self._digest_checks = DigestChecks({}, {})
        self._trim_history()

    def _repeat(self) -> list[ev.Action]:
        repeats = self._pending is not None and not self.closed and self.phase not in UNREACHED
        return [ev.Send(self._pending)] if repeats and self._pending is not None else []


def _text(tokens: Mapping[str, list[Interval]]) -> str:
    return "; ".join(f"{group} {', '.join(map(str, found))}" for group, found in tokens.items())[:500]
