"""Acceptance per draft position, and its comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from baton.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Verifications ("drafts" in vLLM's metrics), and those that accepted draft position 1, 2, ..."""

    num_drafts: int
    accepted: tuple[int, ...]

    @classmethod
    def of_rounds(cls, rounds: Sequence[int], num_positions: int) -> Acceptance:
        return cls(len(rounds), tuple(sum(count > position for count in rounds) for position in range(num_positions)))

    def __add__(self, other: Acceptance) -> Acceptance:
        pairs = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return Acceptance(self.num_drafts + other.num_drafts, tuple(a + b for a, b in pairs))

    def since(self, before: Acceptance) -> Acceptance:
        pairs = zip_longest(self.accepted, before.accepted, fillvalue=0)
        increase = Acceptance(self.num_drafts - before.num_drafts, tuple(a - b for a, b in pairs))
        if min(increase.num_drafts, *increase.accepted, 0) < 0:
            raise ProtocolError("the counters went back: an engine was restarted")
        return increase

    @property
    def rates(self) -> list[float]:
        return [count / self.num_drafts for count in self.accepted] if self.num_drafts else []


@dataclass(frozen=True, slots=True)
class AcceptanceCheck:
    """`problem`: why nothing was compared, or where acceptance differs too much."""

    reference: Acceptance | None = None
    candidate: Acceptance | None = None
    compared: bool = False
    problem: str | None = None
    failed: bool = False

    @property
    def equal(self) -> bool:
        return (
            self.compared
            and self.reference is not None
            and self.candidate is not None
            and self.reference.accepted == self.candidate.accepted
        )


def check_acceptance(
    reference: Acceptance | str, candidate: Acceptance | str, tolerance: float, required: bool
) -> AcceptanceCheck:
    """Compare accepted drafts per position, divided by the reference's verifications. A string says why a side has
    none. The candidate's verifications are not used (docs/verify.md, "Acceptance").
    """
    if isinstance(reference, str) or isinstance(candidate, str):
        known_reference = None if isinstance(reference, str) else reference
        known_candidate = None if isinstance(candidate, str) else candidate
        why = "; ".join(side for side in (reference, candidate) if isinstance(side, str))
        return AcceptanceCheck(known_reference, known_candidate, problem=why, failed=required)
    none = [name for name, side in (("reference", reference), ("candidate", candidate)) if not side.num_drafts]
    if none:
        why = f"no drafts were verified by the {' and the '.join(none)}"
        return AcceptanceCheck(reference, candidate, problem=why, failed=required)
    if len(reference.accepted) != len(candidate.accepted):
        why = f"the reference drafts {len(reference.accepted)} tokens, the candidate {len(candidate.accepted)}"
        return AcceptanceCheck(reference, candidate, problem=why, failed=required)
    for position, (want, have) in enumerate(zip(reference.accepted, candidate.accepted, strict=True)):
        difference = abs(want - have) / reference.num_drafts
        if difference > tolerance:
            why = (
                f"acceptance at draft position {position + 1}: expected {want} accepted drafts, got {have}, "
                f"which differ by {difference:.4f} of the reference's {reference.num_drafts} rounds"
            )
            return AcceptanceCheck(reference, candidate, compared=True, problem=why, failed=True)
    return AcceptanceCheck(reference, candidate, compared=True)
