"""Broken protocols: each undoes one safety rule of the machines or of what runs them, so that it can be shown that
the simulator finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec

from baton.errors import ConfigError
from baton.handoff import greeting, links, machines
from baton.handoff.attempts import Book, DecodeAttempt, PrefillAttempt
from baton.handoff.connector import Connector
from baton.handoff.decode import DecodeHandoff
from baton.handoff.events import (
    Abort,
    Action,
    CopyEnded,
    Deadline,
    MachineEvent,
    PeerLost,
    Received,
    Send,
    StartCopy,
    Tick,
)
from baton.handoff.inbox import Inbox
from baton.handoff.links import Links
from baton.handoff.messages import (
    Ack,
    Announce,
    AttemptKey,
    Bye,
    Cancelled,
    Commit,
    Confirm,
    Hello,
    Message,
    ReadDone,
    Register,
)
from baton.handoff.operations import Operations
from baton.handoff.phases import DecodePhase, PrefillPhase
from baton.handoff.prefill import PrefillHandoff
from baton.handoff.ticket import verify
from baton.testing.simulator.settings import FAULTS

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Mutation:
    """`rule` is what it undoes; `patches` are `(owner, attribute, replacement)`. `faults` are those that it is looked
    for with: where only a rare meeting of a few shows it, these few.
    """

    name: str
    rule: str
    patches: Callable[[], list[Patch]]
    faults: tuple[str, ...] = FAULTS


MUTATIONS: dict[str, Mutation] = {}


def _mutation(
    rule: str, faults: tuple[str, ...] = FAULTS
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def register(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        name = patches.__name__.lstrip("_")
        MUTATIONS[name] = Mutation(name, rule, patches, faults)
        return patches

    return register


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The protocol with a mutation, or as it is. Raises `ConfigError` for a name that is not in `MUTATIONS`."""
    if name is not None and name not in MUTATIONS:
        raise ConfigError("mutation", f"{name!r} is none of {', '.join(MUTATIONS)}")
    with ExitStack() as stack:
        for owner, attribute, replacement in MUTATIONS[name].patches() if name is not None else []:
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


Handle = Callable[[Any], list[Action]]


def _around(owner: type, attribute: str, around: Callable[[Any, Callable[..., Any], Any], Any]) -> list[Patch]:
    """`around(self, original, argument)` in place of a method of one argument."""
    original = getattr(owner, attribute)
    return [(owner, attribute, lambda self, argument: around(self, lambda a: original(self, a), argument))]


# ---------------------------------------------------------------- who frees what, when


@_mutation("P's pages stay until ACK: in pull D reads them, in push a repair does")
def _free_before_ack() -> list[Patch]:
    def around(self: PrefillHandoff, offer: Callable[..., list[Action]], message: Message) -> list[Action]:
        return offer(message) + self._release("committed")

    return _around(PrefillHandoff, "_make_offer", around)


@_mutation("a deadline frees nothing that P may still write")
def _timeout_then_reuse() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        return actions + self._settle(peer_quiet=True) if isinstance(event, Deadline) else actions

    return _around(DecodeHandoff, "handle", around)


@_mutation("a deadline frees nothing that D may still read")
def _timeout_frees_source() -> list[Patch]:
    def around(self: PrefillHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        if isinstance(event, Deadline):
            self._exposed = False
        return handle(event)

    return _around(PrefillHandoff, "handle", around)


@_mutation("an engine that gives up frees nothing that P may still write")
def _abort_then_reuse() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        return actions + self._settle(peer_quiet=True) if isinstance(event, Abort) else actions

    return _around(DecodeHandoff, "handle", around)


@_mutation("D's own reads must have ended before its pages are free")
def _free_while_reading() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        if self.phase is DecodePhase.CLOSING and self.mode == "pull":
            self.copies.outstanding.clear()
            actions += self._settle()
        return actions

    return _around(DecodeHandoff, "handle", around)


@_mutation("a peer that cannot be reached is not one that cannot write")
def _unfenced_is_fenced() -> list[Patch]:
    def around(self: object, handle: Handle, event: MachineEvent) -> list[Action]:
        return handle(replace(event, fenced=True) if isinstance(event, PeerLost) else event)

    return [*_around(DecodeHandoff, "handle", around), *_around(PrefillHandoff, "handle", around)]


@_mutation("only a BYE that says so, of the process in question, proves its copies ended")
def _any_bye_is_quiet() -> list[Patch]:
    original = Inbox._server_left

    def left(self: Inbox, link: Any, bye: Bye) -> None:
        for attempt in self._decodes_at(link.connection.address):
            self._machines.feed(attempt, PeerLost("peer_lost", bye.reason, True))
        original(self, link, bye)

    return [(Inbox, "_server_left", left)]


@_mutation("after `unknown` a copy is outstanding until it has ended")
def _unknown_is_quiet() -> list[Patch]:
    original = Operations.cancel

    def cancel(self: Operations[Any], owner: Any, copy_ids: tuple[int, ...]) -> list[CopyEnded]:
        original(self, owner, copy_ids)
        return [CopyEnded(copy_id, ok=False, message="cancelled") for copy_id in copy_ids]

    return [(Operations, "cancel", cancel)]


@_mutation("FINISHED waits until P's copies have ended")
def _finish_while_copying() -> list[Patch]:
    original = PrefillHandoff._finish

    def finish(self: PrefillHandoff) -> list[Action]:
        outstanding, self.copies.outstanding = self.copies.outstanding, {}
        actions = original(self)
        self.copies.outstanding = outstanding
        return actions

    return [(PrefillHandoff, "_finish", finish)]


# ---------------------------------------------------------------- who gets pages, and for how long

_OVERLOAD = ("full_pools", "burst", "slow_engine", "prefix_store", "late_leg")


@_mutation("D takes pages only for what P has room for", _OVERLOAD)
def _admitted_unseen() -> list[Patch]:
    def around(self: PrefillHandoff, receive: Handle, message: Message) -> list[Action]:
        self.admitted = self.admitted or isinstance(message, Announce)
        return receive(message)

    return _around(PrefillHandoff, "_receive", around)


@_mutation("what waits in a queue has no deadline", _OVERLOAD)
def _deadline_from_ticket() -> list[Patch]:
    def deadline(self: PrefillAttempt | DecodeAttempt, handoff_s: float) -> float:
        return self.expiry

    return [(PrefillAttempt, "deadline", deadline), (DecodeAttempt, "deadline", deadline)]


# ---------------------------------------------------------------- what CANCELLED says


@_mutation("P says CANCELLED only when its copies have ended")
def _cancelled_while_copying() -> list[Patch]:
    def answer(self: PrefillHandoff) -> list[Action]:
        return [] if self.phase is PrefillPhase.OPEN else [_send(Cancelled(self.key, self.reason))]

    return [(PrefillHandoff, "_answer", answer)]


@_mutation("D says CANCELLED only when its reads have ended")
def _cancelled_while_reading() -> list[Patch]:
    def answer(self: DecodeHandoff) -> list[Action]:
        failed = self.phase in (DecodePhase.CLOSING, DecodePhase.FAILED)
        return [_send(Cancelled(self.key, self.reason))] if failed else []

    return [(DecodeHandoff, "_answer", answer)]


@_mutation("CANCELLED is heard")
def _ignore_cancelled() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        deaf = isinstance(event, Received) and isinstance(event.message, Cancelled)
        return [] if deaf else handle(event)

    return _around(DecodeHandoff, "handle", around)


@_mutation("CANCEL is repeated until it is answered")
def _cancel_once() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        return [] if isinstance(event, Tick) and self.phase is DecodePhase.CLOSING else handle(event)

    return _around(DecodeHandoff, "handle", around)


# ---------------------------------------------------------------- what makes a commit


@_mutation("every group must have arrived, the drafter's too")
def _commit_without_draft() -> list[Patch]:
    original = PrefillHandoff._advance

    def advance(self: PrefillHandoff) -> list[Action]:
        everything = self.copies.outstanding
        self.copies.outstanding = {i: copy for i, copy in everything.items() if copy.group != "draft"}
        before = set(self.copies.outstanding)
        actions = original(self)
        started = {i: copy for i, copy in self.copies.outstanding.items() if i not in before}
        self.copies.outstanding = everything | started
        return actions

    return [(PrefillHandoff, "_advance", advance)]


@_mutation("a drafter's entry is final only with the token after it")
def _final_too_early() -> list[Patch]:
    def around(self: PrefillHandoff, declare: Handle, event: Any) -> list[Action]:
        return declare(replace(event, final={group: end + 1 for group, end in event.final.items()}))

    return _around(PrefillHandoff, "_declare", around)


@_mutation("D commits on COMMIT of the repair that it asked for last, no other")
def _old_round_commits() -> list[Patch]:
    def around(self: DecodeHandoff, committed: Handle, message: Commit) -> list[Action]:
        return committed(msgspec.structs.replace(message, round=self.round))

    return _around(DecodeHandoff, "_committed", around)


@_mutation(
    "a COMMIT that was answered with REPAIR says nothing about the repair's copies",
    ("corrupt", "duplicate", "delay", "reorder", "slow_copy", "late_copy", "client_abort", "engine_abort"),
)
def _duplicate_commit_is_progress() -> list[Patch]:
    def around(self: DecodeHandoff, committed: Handle, message: Commit) -> list[Action]:
        closing = self.phase is DecodePhase.CLOSING
        return committed(message) + (self._settle(peer_quiet=True) if closing else [])

    return _around(DecodeHandoff, "_committed", around)


@_mutation("bytes are compared with their digests")
def _skip_digest_check() -> list[Patch]:
    return [(machines, "mismatches", lambda *_: [])]


@_mutation("nothing is committed after a failure")
def _commit_after_failure() -> list[Patch]:
    def around(self: DecodeHandoff, committed: Handle, message: Commit) -> list[Action]:
        if self.phase is DecodePhase.CLOSING and message.round == self.round:
            return self._commit(message, message.num_bytes, message.num_runs)
        return committed(message)

    return _around(DecodeHandoff, "_committed", around)


@_mutation("P confirms only what it still holds")
def _confirm_after_release() -> list[Patch]:
    def around(self: PrefillHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        asked = isinstance(event, Received) and isinstance(event.message, ReadDone)
        if asked and self._seeds is not None and self.phase is PrefillPhase.CLOSED:
            return [_send(Confirm(self.key, self._seeds, self._seeds_digest(self._seeds)))]
        return handle(event)

    return _around(PrefillHandoff, "handle", around)


@_mutation("READ_DONE follows the last read")
def _read_done_early() -> list[Patch]:
    def around(self: DecodeHandoff, ended: Handle, event: CopyEnded) -> list[Action]:
        actions = ended(event)
        if self.phase is DecodePhase.READING and self.copies.outstanding and event.ok:
            actions += self._read_all()
        return actions

    return _around(DecodeHandoff, "_copy_ended", around)


@_mutation("a failed copy is copied again, or fails the handoff")
def _failed_copy_counts() -> list[Patch]:
    def around(self: object, ended: Handle, event: CopyEnded) -> list[Action]:
        return ended(replace(event, ok=True))

    return [*_around(PrefillHandoff, "_copy_ended", around), *_around(DecodeHandoff, "_copy_ended", around)]


# ---------------------------------------------------------------- what is addressed, and to whom


@_mutation("pages follow from intervals, never from the end of a block list")
def _end_trimmed_blocks() -> list[Patch]:
    original = Operations.start

    def start(self: Operations[Any], owner: Any, copy: StartCopy, peer: Any, way: Any, source: Any, *rest: Any) -> Any:
        needed = -(-copy.stop // source.geometry.page_size)
        trimmed = replace(copy, source_pages=copy.source_pages[-needed:])
        return original(self, owner, trimmed, peer, way, source, *rest)

    return [(Operations, "start", start)]


@_mutation("a message is matched by transfer, attempt and both incarnations")
def _attempts_are_one() -> list[Patch]:
    original = Book.get

    def get(self: Book[Any], key: AttemptKey) -> Any:
        return original(self, key) or next((original(self, other) for other in self.same_transfer(key)), None)

    return [(Book, "get", get)]


@_mutation("REGISTER brings a ticket for this very attempt")
def _no_ticket_check() -> list[Patch]:
    def check(self: Links, link: Any, message: Announce | Register) -> Any:
        ticket = verify(self._config.ticket_key, message.ticket, "prefill", self._clock.monotonic())
        return msgspec.structs.replace(ticket, transfer_id=message.key.transfer_id, attempt=message.key.attempt)

    return [(Links, "check_register", check)]


@_mutation("a ticket expires by the engine's monotonic clock, whatever the time of day", ("clock_step", "reorder"))
def _expiry_by_time_of_day() -> list[Patch]:
    original = Links.check_register

    def check(self: Links, link: Any, message: Register) -> Any:
        clock: Any = self._clock
        verify(self._config.ticket_key, message.ticket, "prefill", clock.monotonic() + clock.stepped)
        return original(self, link, message)

    return [(Links, "check_register", check)]


@_mutation("who says HELLO shows that it knows the ticket key", ("stranger", "reorder"))
def _no_proof() -> list[Patch]:
    return [(links, "is_proven", lambda key, side, address, challenge, hello: bool(hello.proof))]


@_mutation("a proof answers the challenge of this connection", ("stranger", "reorder"))
def _proof_without_challenge() -> list[Patch]:
    def said(key: bytes, side: greeting.Side, address: str, challenge: bytes, hello: Hello) -> Hello:
        return greeting.prove(key, side, address, b"", hello)

    def holds(key: bytes, side: greeting.Side, address: str, challenge: bytes, hello: Hello) -> bool:
        return greeting.is_proven(key, side, address, b"", hello)

    return [(links, "prove", said), (links, "is_proven", holds)]


@_mutation("ACK is of a commit, not of an offer to read")
def _ack_at_ready() -> list[Patch]:
    def around(self: DecodeHandoff, ready: Handle, message: Any) -> list[Action]:
        return [*ready(message), _send(Cancelled(self.key, "read soon")), _send(Ack(self.key))]

    return _around(DecodeHandoff, "_ready", around)


def _send(message: Any) -> Action:
    return Send(message)


@_mutation("connecting costs the agent no time", faults=("stop_after_hello", "slow_call", "burst"))
def _blocking_connect() -> list[Patch]:
    def around(self: Any, begin: Callable[..., Any], descriptor: bytes) -> Any:
        future = begin(descriptor)
        self._transport.process.blocked_on = future
        return future

    return _around(Connector, "begin", around)


@_mutation(
    "D registers only when it has the transport's end by which P can be fenced",
    faults=("slow_call", "stop_after_hello", "crash_prefill", "pause_prefill", "client_abort"),
)
def _register_before_connected() -> list[Patch]:
    original = Inbox.join

    def join(self: Inbox, attempt: Any, link: Any, hello: Any) -> None:
        connecting, link.connecting = link.connecting, None
        original(self, attempt, link, hello)
        link.connecting = connecting

    return [(Inbox, "join", join)]
