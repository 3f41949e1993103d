"""The pages of one group as tensors: whole, to copy or store them, and per plane, for kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.kv.spec import GroupSpec


@dataclass(frozen=True, slots=True, eq=False)
class GroupMemory:
    """`pages` uint8 [num_pages, page_bytes]. `planes`, in the spec's order: views [num_pages, num_layers, page_size,
    num_heads, head_dim]. `kv`: keys and values as one view [num_pages, num_layers, 2, page_size, G, D], or None.
    """

    spec: GroupSpec
    pages: Tensor
    planes: tuple[Tensor, ...]
    kv: Tensor | None

    @classmethod
    def over(cls, spec: GroupSpec, pages: Tensor) -> GroupMemory:
        """A group in existing memory, laid out as by `Geometry.block_major`."""
        num_pages, offsets = pages.shape[0], spec.plane_offsets
        planes = []
        for plane, offset in zip(spec.planes, offsets, strict=False):
            size = plane.itemsize
            typed = pages.view(getattr(torch, plane.dtype))
            shape = (num_pages, spec.num_layers, spec.page_size, plane.num_heads, plane.head_dim)
            row = plane.num_heads * plane.head_dim
            strides = (spec.page_bytes // size, offsets[-1] // size, row, plane.head_dim, 1)
            planes.append(typed.as_strided(shape, strides, typed.storage_offset() + offset // size))
        kv = None
        if spec.kind in ("full", "sliding_window") and len(spec.planes) == 2:
            shape_in_page = (spec.num_layers, 2, spec.page_size, spec.planes[0].num_heads, spec.planes[0].head_dim)
            kv = pages.view(planes[0].dtype).view(num_pages, *shape_in_page)
        return cls(spec, pages, tuple(planes), kv)

    @classmethod
    def zeros(cls, spec: GroupSpec, num_pages: int, device: torch.device) -> GroupMemory:
        """Raises `ConfigError`."""
        try:
            pages = torch.zeros(num_pages, spec.page_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            what = f"needs {num_pages * spec.page_bytes} bytes for {spec.name}, which cannot be allocated: {error}"
            raise ConfigError("kv_cache_memory", what) from None
        return cls.over(spec, pages)
