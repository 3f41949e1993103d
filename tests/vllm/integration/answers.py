"""What vLLM servers answer, and whether two answers are the same: tokens, and how each verification ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEAR_TIE = 1e-4  # two best logprobs this close may change places with the last bits of a sum


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens; `margins`, where logprobs were asked for: at each token, how far the second best is; `accepted`, with
    speculation: the drafts that each verification accepted, in order."""

    tokens: Sequence[int]
    margins: Sequence[float]
    accepted: Sequence[int]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """Of the body that a server answered a completion with."""
        choice = body["choices"][0]
        found = (choice.get("logprobs") or {}).get("top_logprobs") or ()
        tops = [sorted(top.values(), reverse=True) for top in found]
        speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
        margins = [top[0] - top[1] for top in tops]
        return cls(choice["token_ids"], margins, speculation.get("per_step_accepted") or ())


def _parting(found: Answer, expected: Answer) -> int | None:
    pairs = zip(found.tokens, expected.tokens, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)


def same(found: Answer, expected: Answer) -> bool | None:
    """Whether tokens are equal; None where they part at a near-tie of the reference."""
    index = _parting(found, expected)
    return True if index is None else None if expected.margins[index] < NEAR_TIE else False


def same_acceptance(found: Answer, expected: Answer, num_drafts: int) -> bool:
    """Whether every verification of a request that was handed over accepted as many drafts as with one server; where
    tokens part, every one before that. vLLM pads the first step with placeholders for drafts, which are all rejected,
    but for a step in which it computes another prompt too."""
    if not expected.accepted:
        return not found.accepted
    index = _parting(found, expected)
    padded = found.accepted[:1] == [0] and _accepted_alike(found.accepted[1:], expected.accepted, num_drafts, index)
    return padded or _accepted_alike(found.accepted, expected.accepted, num_drafts, index)


def _accepted_alike(found: Sequence[int], expected: Sequence[int], num_drafts: int, parting: int | None) -> bool:
    if parting is None:
        return list(found) == list(expected)
    start = 1
    for have, want in zip(found, expected, strict=False):
        if start + num_drafts >= parting:
            break  # the token that parts is among those that this one may decide
        if have != want:
            return False
        start += want + 1
    return True
