"""Packed weights in huge pages."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from baton.kernels.huge_pages import HUGE_PAGE_SIZE, collapse, madvise, pages_of, size_in
from baton.models.layers.linear import Linear

log = logging.getLogger(__name__)
# Weights that the caches may hold gain little.
LEAST_BYTES = 32 << 20


def use_huge_pages(modules: Iterable[object], least_bytes: int = LEAST_BYTES) -> None:
    """Move the packed weights of these modules into huge pages, if the system has any."""
    linears = {
        layer
        for module in modules
        if isinstance(module, nn.Module)
        for layer in module.modules()
        if isinstance(layer, Linear)
    }
    ranges = sorted(found for layer in linears if (found := _place_of(layer)) is not None)
    size = size_in(HUGE_PAGE_SIZE)
    if size is None or sum(count for _, count in ranges) < least_bytes:
        return
    pages = pages_of(ranges, size)
    num_moved = collapse(pages, size, madvise())
    log.debug("%d of %d huge pages for weights", num_moved, len(pages))


def _place_of(layer: Linear) -> tuple[int, int] | None:
    """Address and bytes of the packed weight: one per number of int8, which has scales, else two."""
    found = layer.in_place()
    return None if found is None else (found[0], layer.in_features * layer.out_features * (1 if found[1] else 2))
