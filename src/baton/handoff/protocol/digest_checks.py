"""What D has proven in one attempt: pieces that match P's digests, and running checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.handoff.protocol.events import Action, CheckDigests, DigestsChecked
from baton.handoff.protocol.messages import Digests, PieceDigest
from baton.kv.interval import Interval


@dataclass(slots=True)
class DigestChecks:
    """`pages`: D's block tables."""

    wanted: dict[str, Interval]
    pages: dict[str, list[int]]
    _pieces: dict[str, dict[int, PieceDigest]] = field(default_factory=dict)  # by group and first token
    _checks: dict[int, Digests] = field(default_factory=dict)
    _next_id: int = 0

    @property
    def checking(self) -> bool:
        return bool(self._checks)

    def check(self, digests: Digests) -> list[Action]:
        todo = self._without(self.unproven(digests), self._under_way())
        if not todo:
            return []
        check_id, self._next_id = self._next_id, self._next_id + 1
        self._checks[check_id] = todo
        return [CheckDigests(check_id, todo, self.pages)]

    def checked(self, event: DigestsChecked) -> bool:
        """False if the check was forgotten."""
        todo = self._checks.pop(event.check_id, None)
        if todo is None:
            return False
        bad = {(piece.group, piece.tokens.start) for piece in event.bad}
        for group, pieces in todo.items():
            good = {piece.tokens.start: piece for piece in pieces if (group, piece.tokens.start) not in bad}
            self._pieces.setdefault(group, {}).update(good)
        return True

    def forget_checks(self) -> None:
        """New copies will change the bytes."""
        self._checks.clear()

    def unproven(self, digests: Digests) -> Digests:
        """Without empty groups."""
        return self._without(digests, self._pieces)

    def _under_way(self) -> dict[str, dict[int, PieceDigest]]:
        unproven: dict[str, dict[int, PieceDigest]] = {}
        for todo in self._checks.values():
            for group, pieces in todo.items():
                unproven.setdefault(group, {}).update({piece.tokens.start: piece for piece in pieces})
        return unproven

    @staticmethod
    def _without(digests: Digests, known: Mapping[str, Mapping[int, PieceDigest]]) -> Digests:
        left: Digests = {}
        for group, found in digests.items():
            others = known.get(group, {})
            if pieces := [piece for piece in found if others.get(piece.tokens.start) != piece]:
                left[group] = pieces
        return left

    def proven(self) -> dict[str, int]:
        """Per group, the end of the tokens proven without a gap from the start of the wanted interval."""
        ends: dict[str, int] = {}
        for group, pieces in sorted(self._pieces.items()):
            at = start = self.wanted[group].start
            while at in pieces:
                at = pieces[at].tokens.stop
            if at > start:
                ends[group] = at
        return ends


def digested_tokens(digests: Digests) -> dict[str, list[Interval]]:
    """Per group, with adjacent pieces merged."""
    out: dict[str, list[Interval]] = {}
    for group, pieces in sorted(digests.items()):
        joined = out.setdefault(group, [])
        for piece in pieces:
            if joined and joined[-1].stop == piece.tokens.start:
                joined[-1] = Interval(joined[-1].start, piece.tokens.stop)
            else:
                joined.append(piece.tokens)
    return out
