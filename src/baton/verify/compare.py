"""Comparison of answers: equality of everything a client can observe, and of acceptance at each draft position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.verify.observe import Case, Observed


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first departs from the reference's. `case` is the index of the request."""

    case: int
    length: int
    what: str

    def __str__(self) -> str:
        return f"request {self.case} (prompt of {self.length} tokens): {self.what}"


@dataclass(slots=True)
class Report:
    """One mode's outcome. Acceptance is per draft position, in accepted drafts per verification round."""

    mode: str
    num_cases: int
    num_identical: int = 0
    differences: list[Difference] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    reference_acceptance: list[float] = field(default_factory=list)


def compare(
    mode: str,
    cases: Sequence[Case],
    reference: Sequence[Observed],
    candidate: Sequence[Observed],
    logprob_tolerance: float = 1e-4,
) -> Report:
    """Compare answers pairwise. Speculation on one side only leaves acceptance out, and nothing else."""
    report = Report(mode, len(cases))
    for index, (case, want, have) in enumerate(zip(cases, reference, candidate, strict=True)):
        what = _first_difference(want, have, logprob_tolerance)
        if what is None:
            report.num_identical += 1
        else:
            report.differences.append(Difference(index, case.length, what))
    report.acceptance = acceptance(candidate)
    report.reference_acceptance = acceptance(reference)
    return report


def acceptance(observed: Sequence[Observed]) -> list[float]:
    """Share of verification rounds that accepted the draft at position 1, 2, ..."""
    k = max((o.num_speculative_tokens for o in observed), default=0)
    rounds = [accepted for o in observed for accepted in o.accepted or ()]
    if not rounds:
        return []
    return [sum(accepted > position for accepted in rounds) / len(rounds) for position in range(k)]


def _first_difference(want: Observed, have: Observed, tolerance: float) -> str | None:
    for side, observed in (("reference", want), ("candidate", have)):
        if observed.error is not None:
            return f"no answer from the {side}: {observed.error}"
    for position, (a, b) in enumerate(zip(want.token_ids, have.token_ids, strict=False)):
        if a != b:
            return f"token {position}: expected {a}, got {b}{_draft_position(want, position)}"
    if len(want.token_ids) != len(have.token_ids):
        return f"{len(want.token_ids)} tokens expected, got {len(have.token_ids)}"
    if want.logprobs is not None and have.logprobs is not None:
        if len(want.logprobs) != len(have.logprobs):
            return f"{len(want.logprobs)} logprobs expected, got {len(have.logprobs)}"
        for position, (x, y) in enumerate(zip(want.logprobs, have.logprobs, strict=True)):
            # Written so that a NaN on either side is a difference.
            if not abs(x - y) <= tolerance:
                return f"logprob of token {position}: expected {x:.6f}, got {y:.6f}"
    for name in ("finish_reason", "num_prompt_tokens", "num_completion_tokens"):
        if getattr(want, name) != getattr(have, name):
            return f"{name}: expected {getattr(want, name)}, got {getattr(have, name)}"
    return _acceptance_difference(want, have)


def _acceptance_difference(want: Observed, have: Observed) -> str | None:
    if want.accepted is None or have.accepted is None:
        return None
    if not want.num_speculative_tokens or not have.num_speculative_tokens:
        return None
    token = 1
    for round_index, (a, b) in enumerate(zip(want.accepted, have.accepted, strict=False)):
        if a != b:
            return (
                f"acceptance of round {round_index} (from token {token}): expected {a} drafts, got {b}: "
                f"draft position {min(a, b) + 1} differs"
            )
        token += a + 1
    if len(want.accepted) != len(have.accepted):
        return f"{len(want.accepted)} draft rounds expected, got {len(have.accepted)}"
    return None


def _draft_position(want: Observed, position: int) -> str:
    """Names the draft position of a token in the reference's rounds; the first token comes from prefill."""
    if not want.accepted or position == 0:
        return " (first token)" if position == 0 else ""
    token = 1
    for round_index, accepted in enumerate(want.accepted):
        if position <= token + accepted:
            return f" (draft round {round_index}, draft position {position - token + 1})"
        token += accepted + 1
    return ""
