"""What data-parallel ranks of a model with experts need and vLLM's CPU workers lack: collectives, and kernels that know
that a rank has only some of the experts. For `kv_connector_module_path`, because vLLM imports that module in each
worker.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from baton.vllm.connector import BatonConnector


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, rank by rank; `sizes` gives each one's number of rows."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=self.device_group)
    return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """The sum over all ranks of this rank's rows."""
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]


def with_own_experts(apply: Any) -> Any:
    """`apply` reads expert numbers of the whole model as numbers of this rank's. Experts of other ranks add nothing
    here: their weight is 0.
    """

    def local(self: Any, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **given: Any) -> None:
        numbers = given["expert_map"]
        if numbers is not None:
            topk_ids = numbers[topk_ids.long()].to(topk_ids.dtype)
            elsewhere = topk_ids < 0
            topk_ids, topk_weights = topk_ids.masked_fill(elsewhere, 0), topk_weights.masked_fill(elsewhere, 0.0)
        apply(self, topk_ids=topk_ids, topk_weights=topk_weights, **given)

    return local


CPUUnquantizedExperts.apply = with_own_experts(CPUUnquantizedExperts.apply)
CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv


class Gathering(BatonConnector):
    """The connector as it is."""
