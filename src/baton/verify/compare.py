"""Compare answers: everything that a client observes, and acceptance per draft position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.verify.acceptance_check import Acceptance, AcceptanceCheck
from baton.verify.observe import Case, Observed


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of an answer from the reference. `asked` describes the request."""

    index: int
    asked: str
    what: str

    def __str__(self) -> str:
        return f"request {self.index} ({self.asked}): {self.what}"


@dataclass(slots=True)
class Report:
    """The outcome of one mode. `near_ties`: answers that diverge where the reference's two best tokens are nearly
    equal."""

    mode: str
    num_cases: int
    num_identical: int = 0
    differences: list[Difference] = field(default_factory=list)
    near_ties: list[Difference] = field(default_factory=list)
    max_logprob_difference: float = 0.0
    check: AcceptanceCheck = field(default_factory=AcceptanceCheck)

    @property
    def acceptance(self) -> list[float]:
        return self.check.candidate.rates if self.check.candidate else []

    @property
    def reference_acceptance(self) -> list[float]:
        return self.check.reference.rates if self.check.reference else []

    @property
    def passed(self) -> bool:
        return not self.differences and not self.check.failed


def compare_answers(
    mode: str,
    cases: Sequence[Case],
    reference: Sequence[Observed],
    candidate: Sequence[Observed],
    logprob_tolerance: float | None = 1e-4,
    near_tie: float = 0.0,
) -> Report:
    """`logprob_tolerance` None: without logprobs. If one side does not speculate, acceptance is not compared.
    `near_tie`: see docs/verify.md ("Tolerances").
    """
    report = Report(mode, len(cases))
    for index, (case, want, have) in enumerate(zip(cases, reference, candidate, strict=True)):
        what = _first_difference(want, have, logprob_tolerance)
        gap = _near_tie(want, have, near_tie)
        if what is None:
            report.num_identical += 1
        elif gap is not None:
            gap_text = f"{what}: its logprob is {gap:.2g} below the best"
            report.near_ties.append(Difference(index, str(case), gap_text))
        else:
            report.differences.append(Difference(index, str(case), what))
        report.max_logprob_difference = max(report.max_logprob_difference, _logprob_difference(want, have))
    report.check = AcceptanceCheck(of_answers(reference), of_answers(candidate))
    return report


def of_answers(observed: Sequence[Observed]) -> Acceptance | None:
    if not any(o.accepted for o in observed):
        return None
    rounds = [accepted for o in observed for accepted in o.accepted or ()]
    return Acceptance.of_rounds(rounds, max(o.num_speculative_tokens for o in observed))


def acceptance_rates(observed: Sequence[Observed]) -> list[float]:
    acceptance = of_answers(observed)
    return acceptance.rates if acceptance else []


def _first_difference(want: Observed, have: Observed, tolerance: float | None) -> str | None:
    for side, observed in (("reference", want), ("candidate", have)):
        if observed.error is not None:
            return f"no answer from the {side}: {observed.error}"
    if (written := _prompt_difference(want, have)) is not None:
        return written
    position = _first_divergence(want, have)
    if position is not None:
        a, b = want.token_ids[position], have.token_ids[position]
        return f"token {position}: expected {a}, got {b}{_draft_position(want, position)}"
    if len(want.token_ids) != len(have.token_ids):
        return f"{len(want.token_ids)} tokens expected, got {len(have.token_ids)}"
    if tolerance is not None and want.logprobs is not None and have.logprobs is not None:
        if len(want.logprobs) != len(have.logprobs):
            return f"{len(want.logprobs)} logprobs expected, got {len(have.logprobs)}"
        for position, (x, y) in enumerate(zip(want.logprobs, have.logprobs, strict=True)):
            # NaN on either side is a difference.
            if not abs(x - y) <= tolerance:
                return f"logprob of token {position}: expected {x:.6f}, got {y:.6f}"
    for name in ("finish_reason", "num_prompt_tokens", "num_completion_tokens"):
        expected, got = getattr(want, name), getattr(have, name)
        if expected is not None and got is not None and expected != got:
            return f"{name}: expected {expected}, got {got}"
    return _acceptance_difference(want, have)


def _prompt_difference(want: Observed, have: Observed) -> str | None:
    first, second = want.prompt_token_ids, have.prompt_token_ids
    if first is None or second is None or first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    at = next((position for position, (a, b) in pairs if a != b), min(len(first), len(second)))
    a, b = (str(ids[at]) if at < len(ids) else "its end" for ids in (first, second))
    return f"token {at} of the prompt, which the chat template wrote: expected {a}, got {b}"


def _first_divergence(want: Observed, have: Observed) -> int | None:
    pairs = enumerate(zip(want.token_ids, have.token_ids, strict=False))
    return next((position for position, (a, b) in pairs if a != b), None)


def _near_tie(want: Observed, have: Observed, bound: float) -> float | None:
    """How far the diverging tokens are below the reference's best; None if `bound` or more, or unknown."""
    position = _first_divergence(want, have)
    if position is None or want.top is None or position >= len(want.top) or _prompt_difference(want, have):
        return None
    top, tokens = want.top[position], (want.token_ids[position], have.token_ids[position])
    if not all(token in top for token in tokens):
        return None
    gap = max(top.values()) - min(top[token] for token in tokens)
    return gap if gap < bound else None


def _logprob_difference(want: Observed, have: Observed) -> float:
    position = _first_divergence(want, have)
    pairs = zip((want.logprobs or ())[:position], (have.logprobs or ())[:position], strict=False)
    return max((abs(x - y) for x, y in pairs), default=0.0)


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
    """Draft position in the reference's verifications. The first token comes from the prefill."""
    if not want.accepted or position == 0:
        return " (first token)" if position == 0 else ""
    token = 1
    for round_index, accepted in enumerate(want.accepted):
        if position <= token + accepted:
            return f" (draft round {round_index}, draft position {position - token + 1})"
        token += accepted + 1
    return ""
