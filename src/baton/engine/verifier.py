"""Verification of draft tokens, as pure functions.

`coupled` (default): the target's choice at each row is argmax(logits + the position's own Gumbel noise),
which does not depend on the drafts; a draft is accepted while it equals that choice. Output is therefore
the same token for token with speculation on or off. `rejection` (Leviathan et al., 2023, with the drafter's
argmax as a point-mass proposal): accept draft d with probability p(d), else sample from p without d; only
the distribution is preserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verified:
    """`token_ids`: accepted drafts and one token of the target's own; `num_accepted` of them were drafts."""

    token_ids: list[int]
    num_accepted: int


def verify_coupled(draft_ids: Sequence[int], choose: Callable[[int], int]) -> Verified:
    """`choose(j)` is the target's token at row j, after the drafts before it; called up to the first mismatch."""
    token_ids: list[int] = []
    for row, draft in enumerate(draft_ids):
        token = choose(row)
        token_ids.append(token)
        if token != draft:
            return Verified(token_ids, row)
    token_ids.append(choose(len(draft_ids)))
    return Verified(token_ids, len(draft_ids))


def verify_greedy(draft_ids: Sequence[int], best: Sequence[int], first: int) -> Verified:
    """`verify_coupled` where the target's tokens are known: those from `best[first]` on."""
    num_accepted = 0
    for draft in draft_ids:
        if draft != best[first + num_accepted]:
            break
        num_accepted += 1
    return Verified(list(best[first : first + num_accepted + 1]), num_accepted)


def verify_rejection(
    draft_ids: Sequence[int],
    scores: Callable[[int], Scores],
    uniform: Callable[[int], float],
    noise: Callable[[int], Scores],
) -> Verified:
    """`scores(j)`: processed target logits [V] of row j (-inf where masked); `uniform(j)`, `noise(j)`: its draws."""
    token_ids: list[int] = []
    for row, draft in enumerate(draft_ids):
        row_scores = scores(row)
        if uniform(row) < float(_softmax(row_scores)[draft]):
            token_ids.append(int(draft))
            continue
        residual = row_scores.copy()
        residual[draft] = -np.inf
        token_ids.append(int(np.argmax(residual + noise(row))))
        return Verified(token_ids, row)
    last = len(draft_ids)
    token_ids.append(int(np.argmax(scores(last) + noise(last))))
    return Verified(token_ids, last)


def _softmax(scores: Scores) -> Scores:
    weights: Scores = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights
