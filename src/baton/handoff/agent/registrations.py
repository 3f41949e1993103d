"""D's claims (ANNOUNCE and REGISTER) on P's attempts."""

from __future__ import annotations

import logging
from typing import NamedTuple

from baton.errors import ProtocolError
from baton.handoff.agent.attempts import PrefillAttempt
from baton.handoff.agent.machine_runner import MachineRunner
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.frames import kind_of
from baton.handoff.protocol.messages import Announce, AttemptKey, Cancel, Nack, Register, check_table
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, SignedTicket, Ticket
from baton.handoff.session.session import Session
from baton.kv.interval import Interval
from baton.log_limit import LogLimit
from baton.wire import LegRole, Mode

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

MAX_CANCELLED = 4096
Claim = Announce | Register


class _HeldClaim(NamedTuple):
    """`ticket`: valid on arrival; None if an earlier claim had it."""

    session: Session
    message: Claim
    ticket: SignedTicket | None


class Registrations:
    """The claims on one rank's prefill attempts. Not thread-safe."""

    def __init__(self, runner: MachineRunner) -> None:
        self._groups = list(runner.instance.own)
        self._runner = runner
        self._sessions, self._clock = runner.sessions, runner.clock
        # Claims that wait for the end of an earlier attempt of their transfer, or for their connection.
        self._held: dict[AttemptKey, _HeldClaim] = {}
        # Attempts that D cancelled before they began, with the reason.
        self._cancelled: dict[AttemptKey, str] = {}

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def prefill(self, key: AttemptKey, ticket: SignedTicket) -> PrefillAttempt:
        existing = self._runner.prefills.get(key)
        if existing is not None:
            return existing
        config = self._runner.config
        machine = PrefillHandoff(key, ticket.mode, ticket.text, self._groups, config.max_retries, config.integrity)
        attempt = self._runner.prefills.add(key, PrefillAttempt(self.expiry(ticket, "prefill"), machine=machine))
        reason = self._cancelled.pop(key, None)
        if reason is not None:
            self._runner.feed(attempt, ev.Received(Cancel(key, reason)))
        return attempt

    def expiry(self, ticket: Ticket, role: LegRole) -> float:
        """Monotonic seconds."""
        return min(ticket.expiry(role), self._clock.monotonic() + MAX_TICKET_LIFE_S)

    def supersede(self, key: AttemptKey) -> bool:
        """End earlier attempts of this transfer. True while one has not ended."""
        prefills = self._runner.prefills
        earlier = [other for other in prefills.same_transfer(key) if other.attempt < key.attempt]
        for other in earlier:
            if attempt := prefills.get(other):
                self._runner.feed(attempt, ev.Abort("superseded", "a later attempt of this transfer has begun"))
        return any(other in prefills.live for other in earlier)

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """D gives up an attempt that is unknown here: a later claim of it must start nothing."""
        self._held.pop(key, None)
        self._cancelled[key] = reason
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    def take(self, session: Session, message: Claim) -> None:
        """Accept a claim, hold it, or answer NACK."""
        key = message.key
        known = self._runner.prefills.get(key)
        self._sessions.reach_again(session)
        if known is not None and known.waits_for(session) and known.is_from_peer(session):
            known.restart_time_limit(self._clock.monotonic())
            self._held[key] = _HeldClaim(session, message, None)
            return
        try:
            if known is not None and known.served(session) and known.is_from_peer(session):
                # Its ticket may have expired since its first arrival.
                if isinstance(message, Register) and not known.machine.registered:
                    _check_tables(session, message, known.machine.mode)
                self._feed(known, session, message)
                return
            ticket = self._check(session, message)
            if any(other.attempt > key.attempt for other in self._runner.prefills.same_transfer(key)):
                raise ProtocolError("a later attempt of this transfer has begun")
            waits = self.supersede(key) or session.is_connecting
            if waits and not (known is not None and known.machine.closed):
                self._held[key] = _HeldClaim(session, message, ticket)
                if known is not None:
                    known.restart_time_limit(self._clock.monotonic())
                return
            self._feed(self.prefill(key, ticket), session, message)
        except ProtocolError as error:
            self._runner.counters.count("rejected")
            log.warning("refused %s of %s: %s", kind_of(message), key, error)
            reason = session.refusal[0] if session.refusal else error.reason
            self._runner.channel.send(session.connection, Nack(key, reason, str(error)[:2000]))

    def _check(self, session: Session, message: Claim) -> SignedTicket:
        """Raises `ProtocolError`. A ticket that arrived in time does not expire while the claim waits."""
        held, ticket = self._held.get(message.key), None
        if held is not None and held.session is session and session.refusal is None:
            ticket = held.ticket if held.message.ticket == message.ticket else None
        ticket = ticket or self._sessions.greeting.check_claim(session, message)
        if isinstance(message, Register):
            _check_tables(session, message, ticket.mode)
        return ticket

    def _feed(self, attempt: PrefillAttempt, session: Session, message: Claim) -> None:
        attempt.session = session
        attempt.restart_time_limit(self._clock.monotonic())
        (attempt.on_request if isinstance(message, Register) else attempt.on_hello)(session)
        if isinstance(message, Register) and not attempt.machine.registered:
            attempt.machine.groups = session.pairs.get(message.key.pair, frozenset())
        if session.hello is not None:
            self._runner.on_peer_hello(attempt, session.hello)
        self._runner.feed(attempt, ev.Received(message), strict=True)

    def retry(self) -> None:
        for key, held in list(self._held.items()):
            # In another session D repeats its claim.
            if self._sessions.clients.get(held.session.connection) is held.session:
                self.take(held.session, held.message)
            if self._held.get(key) is held:
                del self._held[key]


def _check_tables(session: Session, message: Register, mode: Mode) -> None:
    """Raises `ProtocolError` unless a REGISTER names only groups of its pair, and pages of its sender's geometry."""
    geometries = session.hello.instance.own if session.hello is not None else {}
    groups = session.pairs.get(message.key.pair, frozenset())
    checked: set[tuple[int, Interval, int, int]] = set()
    for group, tokens in message.wanted.items():
        rank = geometries.get(group)
        if rank is None or group not in groups:
            raise ProtocolError(f"group {group!r} does not exist, or other ranks bring it")
        if mode == "push":
            size, count = rank.geometry.page_size, rank.geometry.num_pages
            table = message.pages.get(group, [])
            if (what := (id(table), tokens, size, count)) not in checked:
                check_table(group, table, tokens, size, count)
                checked.add(what)
