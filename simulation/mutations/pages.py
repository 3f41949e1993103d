"""Mutations of which pages are taken and freed, and of what CANCELLED means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.handoff.agent.attempts import DecodeAttempt, PrefillAttempt
from baton.handoff.agent.decode_routing import DecodeRouting
from baton.handoff.agent.operations import Operations
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.events import (
    Abort,
    Action,
    CopyEnded,
    Deadline,
    MachineEvent,
    PeerLost,
    Received,
    Sampled,
    Send,
    Tick,
)
from baton.handoff.protocol.messages import (
    Admitted,
    Announce,
    Bye,
    Cancelled,
    ControlMessage,
)
from baton.handoff.protocol.phases import DecodePhase, EnginePhase, PrefillPhase
from baton.handoff.protocol.prefill import PrefillHandoff
from simulation.mutations.registry import Handle, Patch, around_method, mutation

# ---------------------------------------------------------------- freeing pages


@mutation("P's pages stay until ACK: in pull D reads them, in push a repair does")
def _free_before_ack() -> list[Patch]:
    def around(self: PrefillHandoff, offer: Callable[..., list[Action]], message: ControlMessage) -> list[Action]:
        return offer(message) + self._release("committed")

    return around_method(PrefillHandoff, "_make_offer", around)


@mutation(
    "a deadline frees nothing that P may still write", ("reorder", "delay", "late_copy", "slow_copy", "slow_work")
)
def _timeout_then_reuse() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        return actions + self._release_if_quiet(peer_quiet=True) if isinstance(event, Deadline) else actions

    return around_method(DecodeHandoff, "handle", around)


@mutation("a deadline frees nothing that D may still read")
def _timeout_frees_source() -> list[Patch]:
    def around(self: PrefillHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        return actions + self._release_if_quiet(peer_quiet=True) if isinstance(event, Deadline) else actions

    return around_method(PrefillHandoff, "handle", around)


@mutation("an engine that gives up frees nothing that P may still write")
def _abort_then_reuse() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        return actions + self._release_if_quiet(peer_quiet=True) if isinstance(event, Abort) else actions

    return around_method(DecodeHandoff, "handle", around)


@mutation("D's own reads must have ended before its pages are free")
def _free_while_reading() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions = handle(event)
        if self.phase is DecodePhase.STOPPING:
            self.copies.outstanding.clear()
            actions += self._release_if_quiet()
        return actions

    return around_method(DecodeHandoff, "handle", around)


@mutation(
    "a peer that cannot be reached is not one that cannot write",
    ("partition", "cut_rank", "pause_prefill", "delay", "slow_copy", "late_copy"),
)
def _unfenced_is_fenced() -> list[Patch]:
    def around(self: object, handle: Handle, event: MachineEvent) -> list[Action]:
        return handle(replace(event, fenced=True) if isinstance(event, PeerLost) else event)

    return [*around_method(DecodeHandoff, "handle", around), *around_method(PrefillHandoff, "handle", around)]


@mutation(
    "only a BYE that says so, of the process in question, proves its copies ended",
    ("leave", "slow_copy", "late_copy", "delay", "broken_connection"),
)
def _any_bye_is_quiet() -> list[Patch]:
    original = DecodeRouting._on_bye

    def left(self: DecodeRouting, session: Any, bye: Bye) -> None:
        for attempt in self._decodes_at(session.connection.address):
            self._runner.feed(attempt, PeerLost("peer_lost", bye.reason, True))
        original(self, session, bye)

    return [(DecodeRouting, "_on_bye", left)]


@mutation("after `unknown` a copy is outstanding until it has ended")
def _unknown_is_quiet() -> list[Patch]:
    original = Operations.cancel

    def cancel(self: Operations[Any], owner: Any, copy_ids: tuple[int, ...]) -> list[CopyEnded]:
        original(self, owner, copy_ids)
        return [CopyEnded(copy_id, ok=False, message="cancelled") for copy_id in copy_ids]

    return [(Operations, "cancel", cancel)]


@mutation("FINISHED waits until P's copies have ended")
def _finish_while_copying() -> list[Patch]:
    def around(self: PrefillHandoff, sampled: Handle, event: Sampled) -> list[Action]:
        outstanding, self.copies.outstanding = self.copies.outstanding, {}
        actions = sampled(event)
        self.copies.outstanding = outstanding | self.copies.outstanding
        return actions

    return around_method(PrefillHandoff, "_sampled", around)


# ---------------------------------------------------------------- taking pages


_OVERLOAD = ("full_pools", "burst", "slow_engine", "prefix_store", "late_leg")


@mutation("D takes pages only for what P has room for", _OVERLOAD)
def _admitted_unseen() -> list[Patch]:
    def around(self: PrefillHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        actions, announced = handle(event), isinstance(event, Received) and isinstance(event.message, Announce)
        unseen = announced and not self.registered and self.engine in (EnginePhase.ABSENT, EnginePhase.OPENED)
        return [*actions, Send(Admitted(self.key))] if unseen and self.phase is PrefillPhase.OPEN else actions

    return around_method(PrefillHandoff, "handle", around)


@mutation("what waits in a queue has no deadline", _OVERLOAD)
def _deadline_from_ticket() -> list[Patch]:
    def deadline(self: PrefillAttempt | DecodeAttempt, handoff_s: float) -> float:
        return self.expiry

    return [(PrefillAttempt, "deadline", deadline), (DecodeAttempt, "deadline", deadline)]


# ---------------------------------------------------------------- the meaning of CANCELLED


@mutation("P says CANCELLED only when its copies have ended")
def _cancelled_while_copying() -> list[Patch]:
    def answer(self: PrefillHandoff) -> list[Action]:
        return [] if self.phase is PrefillPhase.OPEN else [Send(Cancelled(self.key, self.reason))]

    return [(PrefillHandoff, "_answer", answer)]


@mutation("D says CANCELLED only when its reads have ended")
def _cancelled_while_reading() -> list[Patch]:
    def answer(self: DecodeHandoff) -> list[Action]:
        failed = self.closing or self.phase in (DecodePhase.CANCEL_DUE, DecodePhase.FAILED)
        return [Send(Cancelled(self.key, self.reason))] if failed else []

    return [(DecodeHandoff, "_answer", answer)]


@mutation("CANCELLED is heard")
def _ignore_cancelled() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        deaf = isinstance(event, Received) and isinstance(event.message, Cancelled)
        return [] if deaf else handle(event)

    return around_method(DecodeHandoff, "handle", around)


@mutation("CANCEL is repeated until it is answered")
def _cancel_once() -> list[Patch]:
    def around(self: DecodeHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        return [] if isinstance(event, Tick) and self.closing else handle(event)

    return around_method(DecodeHandoff, "handle", around)
