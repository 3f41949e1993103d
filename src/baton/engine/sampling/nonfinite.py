"""Finds logits that are not finite, after an overflow or NaN in the forward. No token may be chosen from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.engine.step_plans import IntArray


def rows_not_finite(logits_NV: Tensor) -> IntArray:
    # Without temporaries: a sum is finite only if its terms are. It may overflow although they are.
    suspects: IntArray = np.flatnonzero(~np.isfinite(logits_NV.sum(dim=-1).cpu().numpy()))
    if not len(suspects):
        return suspects
    rows = logits_NV.index_select(0, torch.from_numpy(suspects).to(logits_NV.device))
    kept: IntArray = suspects[~rows.isfinite().all(dim=-1).cpu().numpy()]
    return kept
