"""Mutations of addressing, of authentication, and of blocking calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from baton.handoff.agent.attempts import AttemptTable
from baton.handoff.agent.decode_routing import DecodeRouting
from baton.handoff.agent.operations import Operations
from baton.handoff.protocol import handshake
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.events import (
    Action,
    Send,
    StartCopy,
)
from baton.handoff.protocol.messages import (
    Ack,
    Announce,
    AttemptKey,
    Cancelled,
    Hello,
    Register,
)
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.ticket import verify_ticket
from baton.handoff.session import greeting
from baton.handoff.session.connecting import TransportEnds
from baton.handoff.session.greeting import Greeting
from baton.handoff.session.session import SessionPhase
from simulation.mutations.registry import Handle, Patch, around_method, mutation


@mutation("pages follow from intervals, never from the end of a block list")
def _end_trimmed_blocks() -> list[Patch]:
    original = Operations.start

    def start(self: Operations[Any], owner: Any, copy: StartCopy, peer: Any, way: Any, source: Any, *rest: Any) -> Any:
        needed = -(-copy.tokens.stop // source.groups[copy.group][0].geometry.page_size)
        trimmed = replace(copy, source_pages=copy.source_pages[-needed:])
        return original(self, owner, trimmed, peer, way, source, *rest)

    return [(Operations, "start", start)]


@mutation("a message is matched by transfer, attempt and both incarnations")
def _attempts_are_one() -> list[Patch]:
    original = AttemptTable.get

    def get(self: AttemptTable[Any], key: AttemptKey) -> Any:
        return original(self, key) or next((original(self, other) for other in self.same_transfer(key)), None)

    return [(AttemptTable, "get", get)]


@mutation("REGISTER brings a ticket for this very attempt")
def _no_ticket_check() -> list[Patch]:
    def check(self: Greeting, session: Any, message: Announce | Register) -> Any:
        ticket = verify_ticket(self._config.ticket_key, message.ticket, "prefill", self._clock.monotonic())
        return msgspec.structs.replace(ticket, transfer_id=message.key.transfer_id, attempt=message.key.attempt)

    return [(Greeting, "check_claim", check)]


@mutation("who has announced an attempt registers it with the ticket that was checked", ("forged_register", "reorder"))
def _no_ticket_check_again() -> list[Patch]:
    return [(PrefillHandoff, "begun_with", lambda self, ticket: True)]


@mutation("a ticket expires by the engine's monotonic clock, whatever the time of day", ("clock_step", "reorder"))
def _expiry_by_time_of_day() -> list[Patch]:
    original = Greeting.check_claim

    def check(self: Greeting, session: Any, message: Register) -> Any:
        clock: Any = self._clock
        verify_ticket(self._config.ticket_key, message.ticket, "prefill", clock.monotonic() + clock.stepped)
        return original(self, session, message)

    return [(Greeting, "check_claim", check)]


@mutation("who says HELLO shows that it knows the ticket key", ("stranger", "reorder"))
def _no_proof() -> list[Patch]:
    return [(greeting, "is_proven", lambda key, side, address, challenge, hello: bool(hello.proof))]


@mutation("a proof answers the challenge of this connection", ("stranger", "reorder"))
def _proof_without_challenge() -> list[Patch]:
    def said(key: bytes, side: handshake.Side, address: str, challenge: bytes, hello: Hello) -> Hello:
        return handshake.prove(key, side, address, b"", hello)

    def holds(key: bytes, side: handshake.Side, address: str, challenge: bytes, hello: Hello) -> bool:
        return handshake.is_proven(key, side, address, b"", hello)

    return [(greeting, "prove", said), (greeting, "is_proven", holds)]


@mutation("ACK is of a commit, not of an offer to read")
def _ack_at_ready() -> list[Patch]:
    def around(self: DecodeHandoff, ready: Handle, message: Any) -> list[Action]:
        return [*ready(message), Send(Cancelled(self.key, "read soon")), Send(Ack(self.key))]

    return around_method(DecodeHandoff, "_ready", around)


@mutation("connecting costs the agent no time", faults=("slow_call",))
def _blocking_connect() -> list[Patch]:
    def around(self: Any, begin: Callable[..., Any], descriptor: bytes) -> Any:
        future = begin(descriptor)
        self._transport.process.blocked_on = future
        return future

    return around_method(TransportEnds, "begin", around)


@mutation(
    "D registers only when it has the transport's end by which P can be fenced",
    faults=("slow_call", "stop_after_hello", "crash_prefill", "pause_prefill", "client_abort"),
)
def _register_before_connected() -> list[Patch]:
    original = DecodeRouting.join

    def join(self: DecodeRouting, attempt: Any, session: Any, hello: Any) -> None:
        phase = session.phase
        if session.is_connecting:
            session.phase = SessionPhase.READY
        original(self, attempt, session, hello)
        session.phase = phase

    return [(DecodeRouting, "join", join)]
