"""Logprobs of tokens, and of the most likely tokens, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.wire import TokenLogprobs


def token_logprobs(
    logits_MV: npt.NDArray[np.float32], token_ids: Sequence[int], num_top: Sequence[int], ranks: bool = False
) -> list[TokenLogprobs]:
    """The logprob of each row's token, and its `num_top` most likely tokens, ties by lower id; with `ranks` also the
    token's rank. The logits are finite. Batch-invariant: sums are NumPy's in float64, row by row."""
    wide = logits_MV.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    own = wide[np.arange(len(wide)), token_ids]
    rank = (wide > own[:, None]).sum(axis=1) + 1 if ranks else np.zeros(len(wide), dtype=np.int64)
    tops = [_likeliest(row, count) for row, count in zip(wide, num_top, strict=True)]
    return [TokenLogprobs(*each) for each in zip(own.tolist(), tops, rank.tolist(), strict=True)]


def _likeliest(row: npt.NDArray[np.float64], count: int) -> list[tuple[int, float]]:
    if not count:
        return []
    # Sorting the whole vocabulary would take milliseconds per row.
    least = np.partition(row, -min(count, len(row)))[-min(count, len(row))]
    among = np.flatnonzero(row >= least)
    order = among[np.argsort(-row[among], kind="stable")][:count]
    return [(int(token), float(row[token])) for token in order]
