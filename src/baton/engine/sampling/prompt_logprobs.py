"""The logprob of each prompt token given the tokens before it (vLLM's `prompt_logprobs`)."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.sampling.logprobs import token_logprobs
from baton.engine.sampling.nonfinite import rows_not_finite
from baton.engine.step_plans import PromptLogprobRows
from baton.wire import TokenLogprobs


def prompt_logprobs(logits_MV: Tensor, wanted: PromptLogprobRows) -> list[TokenLogprobs | None]:
    """Per row; None if its logits are not all finite."""
    not_finite = rows_not_finite(logits_MV)
    if len(not_finite):
        logits_MV = logits_MV.index_fill(0, torch.from_numpy(not_finite).to(logits_MV.device), 0.0)
    rows = logits_MV.float().cpu().numpy()
    logprobs: list[TokenLogprobs | None] = [
        *token_logprobs(rows, wanted.token.tolist(), wanted.num_top.tolist(), ranks=True)
    ]
    for row in not_finite.tolist():
        logprobs[row] = None
    return logprobs
