"""Routed experts with separate matrices, and load balancing."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP, DeepseekV3MoE


class Experts(nn.ModuleList):
    """Replaces the stacked experts of `transformers`: parameters are named as in a checkpoint, and Muon gets
    matrices.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        width = config.moe_intermediate_size
        super().__init__(DeepseekV3MLP(config, width) for _ in range(config.n_routed_experts))

    def forward(self, x_TE: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs by their weights, [T, E]."""
        order = index_TK.flatten().argsort()
        rows = order // index_TK.shape[1]
        counts = torch.bincount(index_TK.flatten(), minlength=len(self)).tolist()
        # In the backward pass, index_select is several times as fast as indexing.
        parts = x_TE.index_select(0, rows).split(counts)
        outputs = torch.cat([expert(part) for expert, part in zip(self, parts, strict=True)])
        weighted = outputs.float() * weight_TK.flatten()[order, None]
        return torch.zeros(x_TE.shape, device=x_TE.device).index_add(0, rows, weighted).to(x_TE.dtype)


def separate_experts(model: nn.Module, config: DeepseekV3Config) -> None:
    """Give every mixture of experts in `model` freshly initialised `Experts`."""
    for module in list(model.modules()):
        if isinstance(module, DeepseekV3MoE):
            module.experts = Experts(config)


class Balance:
    """Load balancing without an auxiliary loss (arXiv:2408.15664): a bias affects the choice of experts, not their
    weights.

    After each step the bias of an expert with more than its share of tokens falls by the step's rate, and that of any
    other rises.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        mixtures = [m for model in models for m in model.modules() if isinstance(m, DeepseekV3MoE)]
        self._gates = [mixture.gate for mixture in mixtures]
        self._counts = [torch.zeros(gate.num_experts) for gate in self._gates]
        for gate, counts in zip(self._gates, self._counts, strict=True):
            gate.register_forward_hook(_counter(counts))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for gate, counts in zip(self._gates, self._counts, strict=True):
            gate.e_score_correction_bias += rate * torch.sign(counts.mean() - counts)
            counts.zero_()

    def busiest(self) -> float:
        """The largest share of tokens of one expert since the last step, over its fair share."""
        return max(float(counts.max() / counts.mean()) for counts in self._counts)


def _counter(counts: Tensor) -> Callable[[nn.Module, object, tuple[Tensor, ...]], None]:
    """A forward hook for a router that counts the tokens of each expert."""

    def count(gate: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        counts.add_(torch.bincount(outputs[2].flatten(), minlength=len(counts)))

    return count
