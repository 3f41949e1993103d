"""Mamba-2 in PyTorch, for devices without a kernel here. For the arithmetic see `kernels/cpu/mamba2.py`.

Prompts are scanned in chunks of matrix products (state space duality: Dao & Gu, 2024, arXiv:2405.21060, section 6), or
row by row if states must not depend on chunks. A verification's few rows are scanned row by row.

Shapes: T rows, H heads of P channels, N state numbers per channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.device import square_sums

CHUNK = 64


def by_row(
    x_THP: Tensor, decay_TH: Tensor, b_THN: Tensor, c_THN: Tensor, state_HNP: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """S = S exp(decay) + B x^T, y = S^T C of one request, row by row; x is already scaled by dt. Returns y [T, H, P],
    and S after the rows `kept`."""
    wanted, out, states = set(kept.tolist()), torch.empty_like(x_THP), []
    for t, factor in enumerate(decay_TH.exp()):
        state_HNP = state_HNP * factor[:, None, None] + b_THN[t][:, :, None] * x_THP[t][:, None]
        out[t] = (state_HNP * c_THN[t][:, :, None]).sum(dim=1)
        if t in wanted:
            states.append(state_HNP)
    return out, torch.stack(states) if states else state_HNP.new_empty(0, *state_HNP.shape)


def by_chunk(
    x_THP: Tensor, decay_TH: Tensor, b_THN: Tensor, c_THN: Tensor, state_HNP: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """As `by_row`, in chunks, within which each row attends to the rows before it; S is passed between chunks."""
    fine_T = (x_THP.sum(dim=(1, 2)) + decay_TH.sum(dim=1) + b_THN.sum(dim=(1, 2)) + c_THN.sum(dim=(1, 2))).isfinite()
    if not fine_T.all():
        # Later rows times 0 may be NaN.
        return by_row(x_THP, decay_TH, b_THN, c_THN, state_HNP, kept)
    outs, states = [], []
    for start in range(0, len(x_THP), CHUNK):
        x, b, c = (part[start : start + CHUNK].transpose(0, 1) for part in (x_THP, b_THN, c_THN))
        total_HT = decay_TH[start : start + CHUNK].T.cumsum(dim=1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        between = (total_HT[:, :, None] - total_HT[:, None, :]).masked_fill(later, -torch.inf).exp()
        inside = (c @ b.transpose(1, 2) * between) @ x
        outs.append((inside + (c @ state_HNP) * total_HT.exp()[:, :, None]).transpose(0, 1))
        last = x.shape[1] - 1
        for row in [*(kept[(kept >= start) & (kept < start + CHUNK)] - start).tolist(), last]:
            weighted = b[:, : row + 1] * between[:, row, : row + 1, None]
            after = weighted.transpose(1, 2) @ x[:, : row + 1] + state_HNP * total_HT[:, row].exp()[:, None, None]
            states.append(after)
        state_HNP = states.pop()
    return torch.cat(outs), torch.stack(states) if states else state_HNP.new_empty(0, *state_HNP.shape)


def gated_norm(y_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, num_groups: int, eps: float) -> Tensor:
    """RMSNorm of y silu(gate) over each of `num_groups` equal parts of a row, in the weight's dtype."""
    gated = (y_TI * F.silu(gate_TI.float())).view(len(y_TI), num_groups, -1)
    normed = gated * torch.rsqrt(square_sums(gated) / gated.shape[-1] + eps)
    return (weight_I.float() * normed.flatten(1)).to(weight_I.dtype)
