"""The scales of a quantized KV cache, as a fact.

With scales per head, engines with different tensor parallelism may store different bytes (docs/vllm.md, "FP8 caches").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from baton.vllm.memory.geometry import CacheLayout

UNSCALED = ("auto", "float32", "float16", "bfloat16")
# By layer and the model's head: the numbers for K and V, and the head's own scales of K and V.
Scales = dict[str, dict[int, tuple[float, float, float, float]]]


def worker_scales(modules: Mapping[str, Any], layout: CacheLayout) -> bytes:
    """`Scales` in msgpack. `modules`: vLLM's attention layers, by name."""
    scales: Scales = {}
    for group in layout.groups:
        plane = layout.geometries[group.name].geometry.planes[0]
        for layer in group.layers:
            module = modules[layer]
            if getattr(module, "kv_cache_dtype", "auto") in UNSCALED:
                continue
            numbers = (float(module._k_scale_float), float(module._v_scale_float))
            keys, values = (
                scale.detach().float().cpu().flatten().expand(plane.num_heads).tolist()
                for scale in (module._k_scale, module._v_scale)
            )
            scales[layer] = {
                plane.first_head + head: (*numbers, *own) for head, own in enumerate(zip(keys, values, strict=True))
            }
    return msgspec.msgpack.encode(scales)


def describe_scales(workers: Iterable[bytes]) -> str:
    """The least and the greatest scale, and a digest of all by head; "none" without a quantized layer."""
    by_layer: dict[str, dict[int, set[tuple[float, float, float, float]]]] = {}
    for worker in workers:
        for layer, heads in msgspec.msgpack.decode(worker, type=Scales).items():
            for head, scales in heads.items():
                by_layer.setdefault(layer, {}).setdefault(head, set()).add(scales)
    every = [scale for heads in by_layer.values() for each in heads.values() for scales in each for scale in scales]
    if not every:
        return "none"
    text = repr(
        [(layer, head, sorted(by_layer[layer][head])) for layer in sorted(by_layer) for head in sorted(by_layer[layer])]
    )
    return f"{min(every):.4g} to {max(every):.4g} ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"
