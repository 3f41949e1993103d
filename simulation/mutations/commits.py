"""Mutations of the rules of commit."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from baton.handoff.agent import digesting
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.events import (
    Action,
    CopyEnded,
    MachineEvent,
    Received,
    Send,
)
from baton.handoff.protocol.messages import (
    Commit,
    Confirm,
    ReadDone,
)
from baton.handoff.protocol.phases import DecodePhase, PrefillPhase
from baton.handoff.protocol.prefill import PrefillHandoff
from simulation.mutations.registry import Handle, Patch, around_method, mutation


@mutation("every group must have arrived, the drafter's too")
def _commit_without_draft() -> list[Patch]:
    original = PrefillHandoff._advance

    def advance(self: PrefillHandoff) -> list[Action]:
        everything = self.copies.outstanding
        self.copies.outstanding = {i: copy for i, copy in everything.items() if "draft" not in copy.group}
        before = set(self.copies.outstanding)
        actions = original(self)
        started = {i: copy for i, copy in self.copies.outstanding.items() if i not in before}
        self.copies.outstanding = everything | started
        return actions

    return [(PrefillHandoff, "_advance", advance)]


@mutation(
    "D commits on COMMIT of the repair that it asked for last, no other",
    ("corrupt", "duplicate", "delay", "reorder", "slow_copy", "late_copy"),
)
def _old_round_commits() -> list[Patch]:
    def around(self: DecodeHandoff, committed: Handle, message: Commit) -> list[Action]:
        return committed(msgspec.structs.replace(message, round=self.round))

    return around_method(DecodeHandoff, "_committed", around)


@mutation(
    "a COMMIT that was answered with REPAIR says nothing about the repair's copies",
    ("corrupt", "duplicate", "delay", "reorder", "slow_copy", "late_copy", "client_abort", "engine_abort"),
)
def _duplicate_commit_is_progress() -> list[Patch]:
    def around(self: DecodeHandoff, committed: Handle, message: Commit) -> list[Action]:
        closing = self.phase is DecodePhase.CLOSING
        return committed(message) + (self._release_if_quiet(peer_quiet=True) if closing else [])

    return around_method(DecodeHandoff, "_committed", around)


@mutation("bytes are compared with their digests")
def _skip_digest_check() -> list[Patch]:
    return [(digesting, "find_mismatches", lambda *_: [])]


@mutation("nothing is committed after a failure")
def _commit_after_failure() -> list[Patch]:
    def around(self: DecodeHandoff, committed: Handle, message: Commit) -> list[Action]:
        if self.phase is DecodePhase.CLOSING and message.round == self.round:
            self.phase = DecodePhase.CHECKING
            return self._commit(message, message.num_bytes, message.num_runs)
        return committed(message)

    return around_method(DecodeHandoff, "_committed", around)


@mutation("P confirms only what it still holds")
def _confirm_after_release() -> list[Patch]:
    def around(self: PrefillHandoff, handle: Handle, event: MachineEvent) -> list[Action]:
        asked = isinstance(event, Received) and isinstance(event.message, ReadDone)
        if asked and self._seeds is not None and self.phase is PrefillPhase.CLOSED:
            return [Send(Confirm(self.key, self._seeds, self._seeds_digest(self._seeds)))]
        return handle(event)

    return around_method(PrefillHandoff, "handle", around)


@mutation("READ_DONE follows the last read")
def _read_done_early() -> list[Patch]:
    def around(self: DecodeHandoff, ended: Handle, event: CopyEnded) -> list[Action]:
        if self.closing or not event.ok or event.copy_id not in self.copies.outstanding:
            return ended(event)
        if self.phase is not DecodePhase.READING:
            self.copies.end(event)
            return []
        rest = {i: copy for i, copy in self.copies.outstanding.items() if i != event.copy_id}
        self.copies.outstanding = {event.copy_id: self.copies.outstanding[event.copy_id]}
        actions = ended(event)
        self.copies.outstanding = rest
        return actions

    return around_method(DecodeHandoff, "_copy_ended", around)


@mutation("a failed copy is copied again, or fails the handoff")
def _failed_copy_counts() -> list[Patch]:
    def around(self: object, ended: Handle, event: CopyEnded) -> list[Action]:
        return ended(replace(event, ok=True))

    return [*around_method(PrefillHandoff, "_copy_ended", around), *around_method(DecodeHandoff, "_copy_ended", around)]
