"""Verification of draft tokens, as pure functions.

`coupled` (default): the target's choice at each row is argmax(logits + the position's own Gumbel noise),
which does not depend on the drafts; a draft is accepted while it equals that choice. Output is therefore
the same token for token with speculation on or off. `rejection` (Leviathan et al., 2023, with the drafter's
argmax as a point-mass proposal): accept draft d with probability p(d), else sample from p without d; only
the distribution is preserved. A row where d is accepted has d for its choice, and no other row has, so that both are
verified alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verified:
    """`token_ids`: accepted drafts and one token of the target's own; `num_accepted` of them were drafts."""

    token_ids: list[int]
    num_accepted: int


def verify(draft_ids: Sequence[int], choices: Sequence[int], first: int) -> Verified:
    """Accept drafts up to the first that is not what the target chooses; its choices are those from `first` on."""
    num_accepted = 0
    for draft in draft_ids:
        if draft != choices[first + num_accepted]:
            break
        num_accepted += 1
    return Verified(list(choices[first : first + num_accepted + 1]), num_accepted)


def rejection_choice(scores: Scores, draft: int, uniform: float, noise: Scores) -> int:
    """What the target chooses at a row with a draft behind it. `scores`: its processed logits [V], -inf where masked;
    `uniform` and `noise` [V]: the row's draws."""
    if uniform < _probability(scores, draft):
        return draft
    # Any other token, even where all are masked: a choice that is the draft would count as its acceptance.
    others = np.delete(scores + noise, draft)
    best = int(np.argmax(others))
    return best + (best >= draft)


def _probability(scores: Scores, token: int) -> float:
    """Softmax of `scores` at `token`; 0 where all tokens are masked."""
    highest = scores.max()
    if highest == -np.inf:
        return 0.0
    weights = np.exp(scores - highest)
    return float(weights[token] / weights.sum())
