"""Mixtures of experts (Shazeer et al., 2017, arXiv:1701.06538): a router, the experts it chooses, and shared ones.

Batch-invariant as `Linear` is: a row's expert outputs are added in the order of their ids, in float32. Shapes: T rows,
E hidden size, X experts, K experts chosen for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.cpu.streams import sqrt_softplus
from baton.models.config import ModelConfig
from baton.models.layers.decoder_layer import MLP, sigmoid
from baton.models.layers.expert_parallel import RemoteExpert, SharedLayer
from baton.models.layers.linear import Build, Linear
from baton.models.layers.specs import MoESpec

ExpertCall = Callable[[Tensor], Tensor]


class Router(Linear):
    """Chooses each row's experts, in float32 whatever the model's dtype (DeepSeek-V2, arXiv:2405.04434, 2.2;
    DeepSeek-V3, arXiv:2412.19437, 2.1.2)."""

    def __init__(self, spec: MoESpec, hidden: int, build: Build) -> None:
        wide = replace(build, dtype=torch.float32)
        super().__init__(hidden, spec.num_experts, wide)
        self._spec = spec
        self.e_score_correction_bias = wide.empty(spec.num_experts) if spec.has_choice_bias else None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, E] -> their experts' ids int64 [T, K], ascending, and weights float32 [T, K]."""
        spec = self._spec
        scores = self._scores(self(x.float()))
        wanted = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if spec.top_groups < spec.num_groups:
            wanted = self._of_best_groups(wanted)
        ids = wanted.topk(spec.top_k, dim=-1).indices.sort(dim=-1).values
        return ids, self._weights(scores, ids)

    def _weights(self, scores: Tensor, ids_TK: Tensor) -> Tensor:
        weights = scores.gather(1, ids_TK)
        if self._spec.renormalise:
            # DeepSeek's term, below the rounding of any sum of scores.
            weights = weights / (row_sum(weights) + 1e-20)
        return weights * self._spec.scale

    def _scores(self, logits: Tensor) -> Tensor:
        if self._spec.scores == "softmax":
            return logits.softmax(dim=-1)
        if self._spec.scores == "sqrtsoftplus":
            return sqrt_softplus(logits) if logits.device.type == "cpu" else F.softplus(logits).sqrt()
        return sigmoid(logits)

    def _of_best_groups(self, wanted: Tensor) -> Tensor:
        spec = self._spec
        by_group = wanted.view(len(wanted), spec.num_groups, -1)
        best = by_group.topk(1 if spec.group_score == "best" else 2, dim=-1).values
        groups = best.unbind(-1)[0] if spec.group_score == "best" else best[..., 0] + best[..., 1]
        is_out = torch.ones_like(groups, dtype=torch.bool)
        is_out.scatter_(1, groups.topk(spec.top_groups, dim=-1).indices, False)
        return by_group.masked_fill(is_out[..., None], -torch.inf).view_as(wanted)


def row_sum(values: Tensor) -> Tensor:
    """Adds column by column: the order of PyTorch's reduction depends on the number of rows."""
    total = values[:, :1]
    for column in range(1, values.shape[1]):
        total = total + values[:, column, None]
    return total


class HashRouter(Router):
    """Takes each token's experts from a table `tid2eid` int64 [V, K] (DeepSeek-V4, 2026): scores weight them only.
    `spec.has_choice_bias` must be false."""

    def __init__(self, spec: MoESpec, hidden: int, vocab_size: int, build: Build) -> None:
        super().__init__(spec, hidden, build)
        table = torch.zeros(vocab_size, spec.top_k, dtype=torch.int64, device=build.device)
        self.tid2eid = nn.Parameter(table, requires_grad=False)

    def choose_for(self, x: Tensor, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        ids = self.tid2eid[token_ids_T].sort(dim=-1).values
        return ids, self._weights(self._scores(self(x.float())), ids)


class Experts(nn.ModuleList):
    """A layer's experts, by id; if data-parallel ranks share them, only this rank's.

    If tensor ranks share them, each expert's `partials` are this rank's partial sums [T, E].
    """

    def __init__(self, make: Callable[[], nn.Module], num_experts: int, hidden: int, build: Build) -> None:
        ranks, self._shared = build.ranks, build.ranks.experts
        local = range(num_experts) if self._shared is None else self._shared.local_experts(num_experts)
        super().__init__(make() if expert in local else RemoteExpert() for expert in range(num_experts))
        self._ranks, self._num_parts = ranks, ranks.num_slices // ranks.size
        # Partial sums side by side.
        self._width = self._num_parts * hidden
        whole = ranks.num_slices == 1
        self._calls: list[ExpertCall] = [expert if whole else _side_by_side(expert) for expert in self]
        if self._shared is not None:
            layer = SharedLayer(self._make, num_experts, hidden, self._width, build.dtype, build.device)
            self._number = self._shared.add(layer)

    def _make(self, rows: Tensor, places_P: Tensor, experts_P: Tensor) -> Tensor:
        return run_experts(self._calls, experts_P, lambda order: rows[places_P[order]], self._width)

    def weighted_sum(self, x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, E] in x's dtype, added in the order of `ids_TK`. Partial sums of tensor ranks are added once per row, for
        all its experts.
        """
        top_k = ids_TK.shape[1]
        if self._shared is not None:
            outputs = self._shared.made(self._number, x, ids_TK)
        else:
            outputs = run_experts(self._calls, ids_TK.flatten(), lambda order: x[order // top_k], self._width)
        by_choice = outputs.view(len(x), top_k, -1)
        total = by_choice[:, 0].float() * weights_TK[:, :1]
        for k in range(1, top_k):
            total = total + by_choice[:, k].float() * weights_TK[:, k, None]
        out = total.to(x.dtype)
        return out if self._ranks.num_slices == 1 else self._ranks.add(out.chunk(self._num_parts, dim=1))


def run_experts(
    experts: Sequence[ExpertCall], experts_P: Tensor, rows: Callable[[Tensor], Tensor], width: int
) -> Tensor:
    """The outputs [P, width] of (row, expert) pairs. `rows` gives the rows of pairs by their indices [N]. Each expert
    is called once.
    """
    order = experts_P.argsort(stable=True)
    chosen = rows(order)
    outputs = torch.empty(len(order), width, dtype=chosen.dtype, device=chosen.device)
    start = 0
    for expert, count in enumerate(torch.bincount(experts_P, minlength=len(experts)).tolist()):
        if count:
            outputs[order[start : start + count]] = experts[expert](chosen[start : start + count])
            start += count
    return outputs


def _side_by_side(expert: nn.Module) -> ExpertCall:
    return lambda rows: torch.cat(cast(Callable[[Tensor], list[Tensor]], expert.partials)(rows), dim=1)


def mlp_experts(spec: MoESpec, hidden: int, build: Build) -> Experts:
    return Experts(lambda: MLP(hidden, spec.intermediate_size, False, build), spec.num_experts, hidden, build)


class MoE(nn.Module):
    """Routed experts, each a SwiGLU MLP, plus a shared one if any: [T, E] -> [T, E]. Parameters have the names of
    DeepSeek's checkpoints."""

    def __init__(self, spec: MoESpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.gate = Router(spec, hidden, build)
        self.experts = mlp_experts(spec, hidden, build)
        self.shared_experts = MLP(hidden, spec.shared_size, False, build) if spec.shared_size else None
        self.shared_gate = Linear(hidden, 1, build) if spec.has_shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.experts.weighted_sum(x, *self.gate.choose(x))
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        if self.shared_gate is not None:
            shared = shared * sigmoid(self.shared_gate(x).float()).to(x.dtype)
        return out + shared  # type: ignore[no-any-return]


def feed_forward(config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
    if config.moe is not None and config.moe.layers[layer_id]:
        return MoE(config.moe, config.hidden_size, build)
    return MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, build)
