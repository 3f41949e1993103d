"""Verification of draft tokens.

`coupled` (default): the target's choice at each row is argmax(logits + Gumbel noise of the position). A draft is
accepted if it equals that choice, so speculation changes no token. `rejection` (Leviathan et al., 2023, with the
drafter's argmax as a point-mass proposal): accept draft d with probability p(d), else sample from p without d; only the
distribution is preserved. A row's choice is d exactly if d is accepted, so `verify` serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verified:
    """`token_ids`: the `num_accepted` drafts, and one token chosen by the target."""

    token_ids: list[int]
    num_accepted: int


def verify(draft_ids: Sequence[int], choices: Sequence[int], first: int) -> Verified:
    num_accepted = 0
    for draft in draft_ids:
        if draft != choices[first + num_accepted]:
            break
        num_accepted += 1
    return Verified(list(choices[first : first + num_accepted + 1]), num_accepted)


def rejection_choice(scores: Scores, draft: int, uniform: float, noise: Scores) -> int:
    """The target's choice at the row before `draft`. `scores`: processed logits [V], -inf if masked. `uniform` and
    `noise` [V]: the position's draws."""
    if uniform < _probability(scores, draft):
        return draft
    # Otherwise the draft would be accepted if it is chosen, or all others are masked.
    others = np.delete(scores + noise, draft)
    best = int(np.argmax(others))
    return best + (best >= draft)


def _probability(scores: Scores, token: int) -> float:
    """Softmax at `token`; 0 if all tokens are masked."""
    highest = scores.max()
    if highest == -np.inf:
        return 0.0
    weights = np.exp(scores - highest)
    return float(weights[token] / weights.sum())
