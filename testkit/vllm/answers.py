"""Answers of vLLM servers, and their comparison: tokens, and the drafts accepted by each verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEAR_TIE = 1e-4  # two best logprobs this close may swap with rounding differences


@dataclass(frozen=True, slots=True)
class Answer:
    """`margins`, if logprobs were requested: the distance to the second best at each token. `accepted`, with
    speculation: the drafts that each verification accepted, in order.
    """

    tokens: Sequence[int]
    margins: Sequence[float]
    accepted: Sequence[int]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """From the body of a completion."""
        choice = body["choices"][0]
        found = (choice.get("logprobs") or {}).get("top_logprobs") or ()
        tops = [sorted(top.values(), reverse=True) for top in found]
        speculation = (body.get("metrics") or {}).get("speculative_decoding") or {}
        margins = [top[0] - top[1] for top in tops]
        return cls(choice["token_ids"], margins, speculation.get("per_step_accepted") or ())


def _first_difference(found: Answer, expected: Answer) -> int | None:
    pairs = zip(found.tokens, expected.tokens, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)


def same(found: Answer, expected: Answer) -> bool | None:
    """Whether tokens are equal; None if they diverge at a near-tie of the reference."""
    index = _first_difference(found, expected)
    return True if index is None else None if expected.margins[index] < NEAR_TIE else False


def same_acceptance(found: Answer, expected: Answer, num_drafts: int) -> bool:
    """Whether every verification of a request that was handed over accepted as many drafts as with one server; if
    tokens diverge, every one before that. vLLM pads the first step with placeholder drafts, which are all rejected,
    except in a step that also computes another prompt.
    """
    if not expected.accepted:
        return not found.accepted
    index = _first_difference(found, expected)
    padded = found.accepted[:1] == [0] and _accepted_alike(found.accepted[1:], expected.accepted, num_drafts, index)
    return padded or _accepted_alike(found.accepted, expected.accepted, num_drafts, index)


def _accepted_alike(found: Sequence[int], expected: Sequence[int], num_drafts: int, parting: int | None) -> bool:
    if parting is None:
        return list(found) == list(expected)
    start = 1
    for have, want in zip(found, expected, strict=False):
        if start + num_drafts >= parting:
            break  # the diverging token is among those that this one may decide
        if have != want:
            return False
        start += want + 1
    return True
