"""Where the KV of a vLLM worker lies: its tensors as regions and geometries, without a copy.

vLLM gives one view `[blocks, heads, tokens, elements]` per layer; all of them lie in one allocation. Attention kernels
on CPU store K and then V in each (block, head) page, each of them in tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.handoff.topology import RankGeometry
from baton.kv.geometry import Geometry
from baton.transports.base import ByteArray
from baton.vllm.groups import LayerGroup


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The memory of a worker's KV cache. `groups` are those given, split where their layers' distances or shapes
    differ; `blocks_per_page` says into how many blocks of the kernel vLLM cut one of its own, by group."""

    regions: list[ByteArray]
    groups: list[LayerGroup]
    geometries: dict[str, RankGeometry]
    blocks_per_page: dict[str, int]


def describe(
    caches: Mapping[str, Any], groups: Sequence[LayerGroup], tiles: Mapping[str, int | None], rank: int = 0
) -> CacheLayout:
    """Describe the `caches` that vLLM registers, by layer. `tiles` is the tile of each layer in tokens; None where the
    kernel's layout is not known, so that pages are copied whole.

    Raises `ConfigError` for memory that is not the host's, or of a shape that is not known.
    """
    regions: dict[int, ByteArray] = {}
    for layer, tensor in caches.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise ConfigError("kv_cache", f"layer {layer!r} is not one tensor of four axes")
        if tensor.device.type != "cpu":
            raise ConfigError(
                "kv_cache", f"BatonConnector moves host memory only, layer {layer!r} is on {tensor.device}"
            )
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in regions:
            regions[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    order = {address: index for index, address in enumerate(regions)}
    out = CacheLayout(list(regions.values()), [], {}, {})
    for group in groups:
        parts = list(_runs([(index, caches[layer], tiles[layer]) for index, layer in enumerate(group.layers)]))
        for number, part in enumerate(parts):
            chosen = [index for index, _, _ in part]
            name = group.name if len(parts) == 1 else f"{group.name}.{number}"
            sub = replace(
                group,
                name=name,
                layers=tuple(group.layers[i] for i in chosen),
                layer_ids=tuple(group.layer_ids[i] for i in chosen),
            )
            tensors = [tensor for _, tensor, _ in part]
            geometry = _geometry(sub, tensors, part[0][2], order[tensors[0].untyped_storage().data_ptr()])
            out.groups.append(sub)
            out.geometries[name] = RankGeometry(rank=rank, geometry=geometry.check())
            out.blocks_per_page[name] = 1 if group.kind == "state" else group.block_size // geometry.page_size
    return out


_Part = list[tuple[int, Tensor, "int | None"]]


def _runs(layers: _Part) -> list[_Part]:
    """Neighbouring layers of one shape at one distance."""
    runs: list[_Part] = []
    for entry in layers:
        run = runs[-1] if runs else []
        tensor, tile = entry[1:]
        alike = bool(run) and (tensor.shape, tensor.stride(), tensor.dtype, tile) == (
            run[0][1].shape,
            run[0][1].stride(),
            run[0][1].dtype,
            run[0][2],
        )
        same_memory = bool(run) and tensor.untyped_storage().data_ptr() == run[0][1].untyped_storage().data_ptr()
        step = tensor.data_ptr() - run[-1][1].data_ptr() if run else 0
        if (
            alike
            and same_memory
            and step > 0
            and (len(run) == 1 or step == run[1][1].data_ptr() - run[0][1].data_ptr())
        ):
            run.append(entry)
        else:
            runs.append([entry])
    return runs


def _geometry(group: LayerGroup, tensors: Sequence[Tensor], tile: int | None, region: int) -> Geometry:
    first = tensors[0]
    blocks, heads, tokens, width = first.shape
    itemsize = first.element_size()
    page, head, token, element = (stride * itemsize for stride in first.stride())
    halves = 2 if group.kind in ("full", "sliding_window") else 1
    if halves == 2:
        if (element, token, head) != (itemsize, width * itemsize, tokens * width * itemsize) and heads > 1:
            raise ConfigError("kv_cache", f"group {group.name!r}: a (block, head) page is not contiguous")
        if width % 2:
            raise ConfigError("kv_cache", f"group {group.name!r}: K and V differ in width")
        width //= 2
        token = width * itemsize
    if group.kind == "state" and tokens != 1:
        raise ConfigError("kv_cache", f"group {group.name!r}: a state has no token axis")
    storage = first.untyped_storage()
    return Geometry(
        group=group.name,
        region=region,
        region_bytes=storage.nbytes(),
        num_pages=blocks,
        page_size=tokens,
        num_layers=len(tensors),
        num_halves=halves,
        num_heads=heads,
        head_dim=width,
        dtype=_dtype(first.dtype),
        layer_stride=tensors[1].data_ptr() - first.data_ptr() if len(tensors) > 1 else page * blocks,
        page_stride=page,
        half_stride=tokens * width * itemsize,
        token_stride=token,
        head_stride=head,
        element_stride=element,
        first_head=0,
        layer_ids=group.layer_ids,
        base=first.data_ptr() - storage.data_ptr(),
        tile=tile if tile is not None else tokens,
    )


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "uint8" if name == "int8" else name


def kernel_pages(table: Sequence[int], blocks_per_page: int) -> list[int]:
    """A block table of vLLM's in blocks of the kernel: each of vLLM's is `blocks_per_page` of them, in a row."""
    if blocks_per_page == 1:
        return list(table)
    pages = np.asarray(table, dtype=np.int64)[:, None] * blocks_per_page + np.arange(blocks_per_page)
    pages[np.asarray(table) == 0] = 0
    return [int(page) for page in pages.reshape(-1)]
