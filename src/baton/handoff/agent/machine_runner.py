"""Feeds events to a rank's state machines, and carries out their actions. Not thread-safe."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec

from baton.errors import ProtocolError, UndefinedTransitionError
from baton.handoff.agent.attempts import AttemptTable, DecodeAttempt, PrefillAttempt
from baton.handoff.agent.digesting import Digesting
from baton.handoff.agent.operations import Operations
from baton.handoff.agent.stats import AgentCounters
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.digests import Cell, Digester, share
from baton.handoff.protocol.event_names import name_of
from baton.handoff.protocol.messages import Ack, AttemptKey, AttemptMessage, Cancel, Cancelled, Commit, Hello
from baton.handoff.session.base import Worker
from baton.handoff.session.session import Session
from baton.handoff.session.sessions import Sessions
from baton.log_limit import LogLimit
from baton.transports.base import Transport

log = logging.getLogger(__name__)
log.addFilter(LogLimit())
Attempt = PrefillAttempt | DecodeAttempt
OnPeer = Callable[[AttemptKey, Instance], None]


class MachineRunner:
    """`on_peer` is called with the peer's instance for each attempt where either engine has several ranks."""

    def __init__(
        self,
        sessions: Sessions,
        instance: Instance,
        transport: Transport,
        on_event: Callable[[ev.HandoffEvent], None],
        digester: Digester | None,
        worker: Worker | None,
        on_peer: OnPeer | None,
    ) -> None:
        self.sessions, self.instance = sessions, instance
        self.config, self.channel, self.clock = sessions.config, sessions.channel, sessions.clock
        self.prefills: AttemptTable[PrefillAttempt] = AttemptTable()
        self.decodes: AttemptTable[DecodeAttempt] = AttemptTable()
        self.operations: Operations[Attempt] = Operations(transport, self.channel.wake)
        self.counters = AgentCounters()
        self.undefined: UndefinedTransitionError | None = None
        self._timers = self.config.timers
        self._on_event, self._on_peer = on_event, on_peer
        self._digesting: Digesting[Attempt] | None = None
        if digester is not None and worker is not None:
            self._digesting = Digesting(digester, instance.own, worker, self.channel.wake)
        self._queue: deque[tuple[Attempt, ev.MachineEvent]] = deque()
        self._acks: deque[tuple[float, Attempt, Ack]] = deque()  # with their times
        self._running = False

    def live(self) -> list[Attempt]:
        return [*self.prefills.live.values(), *self.decodes.live.values()]

    def session(self, attempt: Attempt) -> Session | None:
        if isinstance(attempt, PrefillAttempt):
            return attempt.session
        return self.sessions.servers.get(attempt.address)

    def feed(self, attempt: Attempt, event: ev.MachineEvent, strict: bool = False) -> None:
        """`strict`: raise the machine's `ProtocolError`."""
        self._queue.append((attempt, event))
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                target, what = self._queue.popleft()
                self._note_copies(target, what)
                try:
                    actions = target.machine.handle(what)
                except ProtocolError as error:
                    if strict and what is event:
                        raise
                    self._refused(target, what, error)
                    continue
                for action in actions:
                    if isinstance(action, ev.Notify):
                        self._notify(target, action.event)
                    else:
                        self._carry_out(target, action)
                if not isinstance(what, ev.Tick) and any(isinstance(action, ev.Send) for action in actions):
                    self._rewind(target)
                now = self.clock.monotonic()
                self.prefills.to_tombstone(target.machine.key, now)
                self.decodes.to_tombstone(target.machine.key, now)
        finally:
            self._running = False

    def _note_copies(self, attempt: Attempt, event: ev.MachineEvent) -> None:
        """The times of this side's copies, or of P's from its COMMIT."""
        match event:
            case ev.CopyEnded(ok=True):
                attempt.on_copy(self.clock.monotonic())
            case ev.Received(Commit(copied=(first, last))):
                now = self.clock.monotonic()
                attempt.copied = (now - first, now - last)

    def _refused(self, attempt: Attempt, event: ev.MachineEvent, error: ProtocolError) -> None:
        """A forbidden message is dropped. Any other impossible event is a bug: the attempt fails."""
        self.counters.count("rejected")
        received = isinstance(event, ev.Received)
        if not isinstance(error, UndefinedTransitionError) or (received and error.event == name_of(event)):
            log.warning("attempt %s refused an event: %s", attempt.machine.key, error)
            return
        self.undefined = error
        log.error("attempt %s: %s", attempt.machine.key, error)
        if not isinstance(event, ev.Fault):
            self.feed(attempt, ev.Fault("internal_error", str(error)))

    def fail(self, attempt: Attempt, reason: str, message: str, quiet: bool = False) -> None:
        """`quiet`: the peer reported that its copies ended."""
        self.feed(attempt, ev.PeerLost(reason, message, quiet or attempt.fenced))

    def stalled(self, session: Session) -> None:
        """The peer's agent answers, but its engine hangs."""
        for attempt in self.live():
            if self.session(attempt) is session:
                self.feed(attempt, ev.Fault("engine_stalled", "the peer's engine thread hangs"))

    def tick(self, now: float) -> None:
        for attempt in self.live():
            if now >= attempt.next_tick:
                attempt.gap = min(max(2 * attempt.gap, self._timers.retry_min), self._timers.retry)
                attempt.next_tick = now + attempt.gap
                self.feed(attempt, ev.Tick())

    def send_acks(self, now: float) -> float:
        """Send those that are due. Returns when the next one is."""
        while self._acks and self._acks[0][0] <= now:
            _, attempt, message = self._acks.popleft()
            self._transmit(attempt, message)
        return self._acks[0][0] if self._acks else math.inf

    def _rewind(self, attempt: Attempt) -> None:
        """Restart the retry intervals, after a message was sent."""
        session = self.session(attempt)
        attempt.gap = self._timers.first_retry(session.round_trip if session else None)
        attempt.next_tick = self.clock.monotonic() + attempt.gap

    def on_peer_hello(self, attempt: Attempt, hello: Hello) -> None:
        key = attempt.machine.key
        several = max(hello.instance.num_ranks, self.instance.num_ranks) > 1
        if several and self._on_peer is not None:
            self._on_peer(key, hello.instance)

    def _carry_out(self, attempt: Attempt, action: ev.Action) -> None:
        match action:
            case ev.Send(message):
                self._send(attempt, message)
            case ev.StartCopy():
                self._start_copy(attempt, action)
            case ev.CancelCopies(copy_ids):
                for end in self.operations.cancel(attempt, copy_ids):
                    self.feed(attempt, end)
            case ev.ComputeDigests() | ev.CheckDigests():
                assert self._digesting is not None
                self._digesting.begin(attempt, action, partial(self._share, *self._instances(attempt)))
            case ev.Count(name, by):
                self.counters.count(name, by)

    def _send(self, attempt: Attempt, message: AttemptMessage) -> None:
        if isinstance(message, Ack):
            self._acks.append((self.clock.monotonic() + self._timers.ack, attempt, message))
        else:
            self._transmit(attempt, message)

    def _transmit(self, attempt: Attempt, message: AttemptMessage) -> None:
        session = self.session(attempt)
        if session is None or not (
            session.ready or (session.hello is not None and isinstance(message, Cancel | Cancelled))
        ):
            return  # repeated in the next session; CANCEL and CANCELLED are valid in any
        if isinstance(message, Commit) and attempt.copied is not None:
            first, last = (max(0.0, self.clock.monotonic() - time) for time in attempt.copied)
            message = msgspec.structs.replace(message, copied=(first, last))
        try:
            self.channel.send(session.connection, message)
        except ProtocolError as error:
            self.feed(attempt, ev.Fault("message_too_large", str(error)))

    def _start_copy(self, attempt: Attempt, copy: ev.StartCopy) -> None:
        if attempt.open is None or attempt.peer_instance is None:
            self.feed(attempt, ev.CopyEnded(copy.copy_id, ok=False, message="no session with the peer"))
            return
        push = isinstance(attempt, PrefillAttempt)
        source, dest = self._instances(attempt)
        tag = f"{attempt.machine.key} {copy.group} {copy.tokens}"
        direction: Literal["write", "read"] = "write" if push else "read"
        end = self.operations.start(attempt, copy, attempt.open, direction, source, dest, tag)
        if end is not None:
            self.feed(attempt, end)

    def _instances(self, attempt: Attempt) -> tuple[Instance, Instance]:
        """Requires the peer's HELLO."""
        assert attempt.peer_instance is not None
        prefills = isinstance(attempt, PrefillAttempt)
        return (self.instance, attempt.peer_instance) if prefills else (attempt.peer_instance, self.instance)

    @staticmethod
    def _share(source: Instance, dest: Instance, group: str) -> Sequence[Cell]:
        return share(tuple(source.groups[group]), dest.own[group], source.rank)

    def poll(self) -> None:
        for owner, end in self.operations.ended():
            self.feed(owner, end)
        for owner, event in self._digesting.ended() if self._digesting is not None else ():
            if isinstance(event, ev.DigestsChecked):
                self._log_bad(owner, event.bad)
            self.feed(owner, event)

    def _log_bad(self, attempt: Attempt, bad: Sequence[ev.BadPiece]) -> None:
        for piece in bad:
            log.warning(
                "attempt %s: rank %d, group %s, layers %s, tokens %s do not match their digests (planes %s)",
                attempt.machine.key,
                self.instance.rank,
                piece.group,
                sorted({layer for layer, _ in piece.cells}),
                piece.tokens,
                ", ".join(sorted({plane for _, plane in piece.cells})),
            )

    def _notify(self, attempt: Attempt, event: ev.HandoffEvent) -> None:
        self.counters.note(event, attempt.machine.copies)
        if isinstance(event, ev.DecodeCommitted):
            event = replace(event, copied=attempt.copied)
        if isinstance(attempt, DecodeAttempt):
            self.sessions.health.note(event, repaired=attempt.machine.round > 0)
        try:
            self._on_event(event)
        except Exception:
            log.exception("the engine's handler failed on %r", event)
