"""Prompt logprobs: the logprob of each prompt token given the tokens before it (vLLM's `prompt_logprobs`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.engine.plan import Scored
from baton.engine.sampling.nonfinite import rows_not_finite
from baton.wire import TokenLogprobs


def scores_of(logits_MV: Tensor, scored: Scored) -> list[TokenLogprobs | None]:
    """The logprob and rank of each row's token, and the most likely tokens, ties by lower id. None for a row whose
    logits are not all finite. Batch-invariant: sums are NumPy's in float64, row by row."""
    not_finite = rows_not_finite(logits_MV)
    wide = logits_MV.double().cpu().numpy()
    wide[not_finite] = 0.0
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    own = wide[np.arange(len(wide)), scored.token]
    ranks = (wide > own[:, None]).sum(axis=1) + 1
    tops = [_likeliest(row, count) for row, count in zip(wide, scored.num_top.tolist(), strict=True)]
    found: list[TokenLogprobs | None] = [
        TokenLogprobs(value, top, rank) for value, top, rank in zip(own.tolist(), tops, ranks.tolist(), strict=True)
    ]
    for row in not_finite.tolist():
        found[row] = None
    return found


def _likeliest(row: npt.NDArray[np.float64], count: int) -> list[tuple[int, float]]:
    if not count:
        return []
    # Sorting the whole vocabulary would take milliseconds per row.
    least = np.partition(row, -min(count, len(row)))[-min(count, len(row))]
    among = np.flatnonzero(row >= least)
    order = among[np.argsort(-row[among], kind="stable")][:count]
    return [(int(token), float(row[token])) for token in order]
