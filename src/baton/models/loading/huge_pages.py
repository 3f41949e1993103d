"""Packed weights in huge pages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from baton.kernels.huge_pages import move, pages_of
from baton.models.layers.linear import Linear

# Smaller weights may stay in the caches, and gain little.
LEAST_BYTES = 32 << 20


def use_huge_pages(modules: Iterable[object], least_bytes: int = LEAST_BYTES) -> None:
    linears = {
        layer
        for module in modules
        if isinstance(module, nn.Module)
        for layer in module.modules()
        if isinstance(layer, Linear)
    }
    ranges = sorted(found for layer in linears if (found := _place_of(layer)) is not None)
    if sum(count for _, count in ranges) >= least_bytes:
        move("weights", lambda size: pages_of(ranges, size))


def _place_of(layer: Linear) -> tuple[int, int] | None:
    """Address and bytes of the packed weight: one per number of int8, which has scales, else two."""
    found = layer.in_place()
    return None if found is None else (found[0], layer.in_features * layer.out_features * (1 if found[1] else 2))
