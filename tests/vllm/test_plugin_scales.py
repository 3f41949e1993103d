"""The scales of FP8 KV as a fact: equal for any number of ranks if each layer has one scale, else told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.vllm.memory.geometry import WorkerHeads, describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.memory.scales import describe_scales, worker_scales

HEADS, LAYERS = 4, ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")  # the last is the drafter's


def layer(*scales: float, cache_dtype: str = "fp8", times: float = 1.0, number_times: float = 1.0) -> Any:
    """vLLM's attention layer with one scale, or one of each head of its worker."""
    return SimpleNamespace(
        kv_cache_dtype=cache_dtype,
        _k_scale=torch.tensor(scales),
        _v_scale=torch.tensor(scales) * times,
        _k_scale_float=max(scales),
        _v_scale_float=max(scales) * number_times,
    )


def told(size: int, *scales: float, cache_dtype: str = "fp8", times: float = 1.0, number_times: float = 1.0) -> str:
    """By an engine of `size` tensor ranks, whose first layer has these `scales`, of V so many `times`."""
    workers = []
    for rank in range(size):
        caches = {name: torch.zeros(5, HEADS // size, 32, 16, dtype=torch.uint8) for name in LAYERS}
        groups = split_tables([CacheTable(0, "full", None, 32, LAYERS)], num_target_layers=2)
        heads = WorkerHeads(rank, size, {"target": HEADS, "draft": HEADS})
        layout = describe_caches(caches, groups, dict.fromkeys(LAYERS, "k_by_dimension"), worker=heads)
        own = scales if len(scales) == 1 else scales[rank * HEADS // size : (rank + 1) * HEADS // size]
        modules = dict.fromkeys(LAYERS, layer(1.0, cache_dtype=cache_dtype))
        modules[LAYERS[0]] = layer(*own, cache_dtype=cache_dtype, times=times, number_times=number_times)
        workers.append(worker_scales(modules, layout))
    return describe_scales(workers)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_scale_of_a_layer_is_the_same_on_any_number_of_ranks(size: int) -> None:
    assert told(size, 0.25) == told(1, 0.25)
    assert told(size, 0.25).startswith("0.25 to 1 (")
    assert told(size, 0.25) != told(size, 0.5)
    assert told(size, 0.25, cache_dtype="auto") == "none"
    of_v = {told(size, 0.25, times=times, number_times=number) for times in (1, 2) for number in (1, 2)}
    assert len(of_v) == 4


def test_scales_of_heads_are_told_apart_by_what_kernels_may_use() -> None:
    """A kernel may use the largest of its worker's heads: then two ranks store other bytes than one."""
    assert told(1, 0.25, 0.25, 0.5, 0.5) != told(2, 0.25, 0.25, 0.5, 0.5)
    assert told(2, 0.25, 0.25, 0.5, 0.5) == told(2, 0.25, 0.25, 0.5, 0.5) != told(2, 0.25, 0.5, 0.5, 0.5)
    assert told(4, 0.5, 0.25, 0.5, 0.5) != told(4, 0.25, 0.5, 0.5, 0.5)
