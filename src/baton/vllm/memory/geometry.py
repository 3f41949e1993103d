"""Describes the KV cache tensors of a vLLM worker as regions and geometries, without a copy.

vLLM has one view `[blocks, heads, tokens, elements]` per layer. On GPUs the attention kernels choose its strides, and a
(head, token) entry holds K, then V. For pages on CPUs, and granularity, see docs/reference/vllm-design.md ("Geometry on
CPU").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.handoff.plan.topology import RankGeometry
from baton.kv.geometry import Geometry, Plane
from baton.kv.spec import Cut, Owner
from baton.transports.base import DeviceMemory, Region
from baton.vllm.memory.groups import LayerGroup
from baton.vllm.memory.states import StatePart, dtype_name, layer_stride, state_geometry

# How a kernel stores a page; "k_by_dimension": K by dimension, then V by token.
KernelLayout = Literal["tokens", "k_by_dimension", "unknown"]
Granularity = Literal["page", "token"]


@dataclass(frozen=True, slots=True)
class WorkerHeads:
    """The heads of one of `size` tensor-parallel workers. `num_kv_heads`: the model's, by owner. If there are fewer
    than workers, adjacent workers hold the same head."""

    rank: int
    size: int
    num_kv_heads: Mapping[Owner, int]

    def first_head(self, owner: Owner, num_heads: int) -> int:
        """The model's index of this worker's first head, if a layer here has `num_heads` heads.

        Raises `ConfigError`.
        """
        total = self.num_kv_heads[owner]
        if self.size == 1 or num_heads == total:
            return 0
        if num_heads != max(total // self.size, 1):
            raise ConfigError("tensor_parallel_size", f"a worker of {self.size} has {num_heads} of {total} KV heads")
        return self.rank * min(self.size, total) // self.size * num_heads


ALONE = WorkerHeads(0, 1, {"target": 1, "draft": 1})


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A worker's KV cache in memory. `groups`: the given ones, split where the layers' distances or shapes differ.
    `blocks_per_page`: by group, the kernel pages in one vLLM block."""

    regions: list[Region]
    groups: list[LayerGroup]
    geometries: dict[str, RankGeometry]
    blocks_per_page: dict[str, int]

    @property
    def shared_tables(self) -> dict[str, str]:
        return {group.name: f"{group.table}/{self.blocks_per_page[group.name]}" for group in self.groups}

    def kernel_tables(self, tables: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """By group, from vLLM's block tables."""
        by_group: dict[str, list[int]] = {}
        shared = self.shared_tables
        for group in self.groups:
            if (name := shared[group.name]) not in by_group:
                by_group[name] = kernel_pages(tables[group.table], self.blocks_per_page[group.name])
        return {group: by_group[name] for group, name in shared.items()}


def describe_caches(
    caches: Mapping[str, Any],
    groups: Sequence[LayerGroup],
    kernels: Mapping[str, KernelLayout],
    granularity: Granularity = "page",
    worker: WorkerHeads = ALONE,
    num_stages: int = 1,
    states: Mapping[str, Sequence[StatePart]] | None = None,
) -> CacheLayout:
    """Describe `caches`: by layer, the tensors `[blocks, heads, tokens, elements]` that vLLM registers in `worker`.

    `kernels`: how each layer's attention kernel stores pages. `states`: the layout of a slot, for state layers with a
    known one. Names of groups do not depend on the worker's pipeline stage, of `num_stages`.

    Raises `ConfigError` for memory of other devices, an unknown shape, a layer with several caches (such as a sparse
    attention's indexer), and states on several tensor ranks that are not in `states`.
    """
    states = states or {}
    regions: dict[int, Region] = {}
    for layer, tensor in caches.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise ConfigError("kv_cache", f"layer {layer!r} is not one tensor of four axes")
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in regions:
            regions[storage.data_ptr()] = region_of(storage)
    order = {address: index for index, address in enumerate(regions)}
    out = CacheLayout(list(regions.values()), [], {}, {})
    for group in groups:
        runs = _runs([(index, caches[layer], kernels[layer]) for index, layer in enumerate(group.layers)])
        # A stage with one layer cannot tell whether other stages split this group; most do. Drafters are on one stage.
        alone = num_stages > 1 and len(group.layers) == 1 and group.owner == "target"
        split = len(runs) > 1 or alone
        for run in runs:
            part = replace(
                group,
                name=f"{group.name}.{group.layer_ids[run[0][0]]}" if split else group.name,
                layers=tuple(group.layers[index] for index, _, _ in run),
                layer_ids=tuple(group.layer_ids[index] for index, _, _ in run),
            )
            tensors, kernel = [tensor for _, tensor, _ in run], run[0][2]
            region = order[tensors[0].untyped_storage().data_ptr()]
            if group.kind == "state":
                held = [states.get(layer) for layer in part.layers]
                geometry = state_geometry(part, tensors, region, held, alone=worker.size == 1).check()
            else:
                geometry = _geometry(part, tensors, kernel, granularity, region, worker).check()
            if part.name in out.geometries:
                # Groups are named by layer number, so a second cache of a layer would replace the first.
                raise ConfigError(
                    "model", f"layer {part.layer_ids[0]} has several caches, among them {part.layers[0]!r}"
                )
            out.groups.append(part)
            out.geometries[part.name] = RankGeometry(rank=worker.rank, geometry=geometry)
            out.blocks_per_page[part.name] = 1 if group.kind == "state" else group.block_size // geometry.page_size
    return out


def region_of(storage: torch.UntypedStorage) -> Region:
    """Raises `ConfigError`."""
    kind = storage.device.type
    if kind == "cpu":
        return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    if kind == "cuda":
        device = storage.device.index
        return DeviceMemory(storage.data_ptr(), storage.nbytes(), device, lambda: torch.cuda.set_device(device))
    raise ConfigError("kv_cache", f"BatonConnector moves memory of the host or of a CUDA device, this is on {kind}")


_Run = list[tuple[int, Tensor, KernelLayout]]


def _runs(layers: _Run) -> list[_Run]:
    runs: list[_Run] = []
    for entry in layers:
        if not runs or not _continues(runs[-1], entry[1], entry[2]):
            runs.append([])
        runs[-1].append(entry)
    return runs


def _continues(run: _Run, tensor: Tensor, kernel: KernelLayout) -> bool:
    first, last = run[0][1], run[-1][1]
    if (tensor.shape, tensor.stride(), tensor.dtype, kernel) != (first.shape, first.stride(), first.dtype, run[0][2]):
        return False
    if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return False
    step = tensor.data_ptr() - last.data_ptr()
    return step > 0 and (len(run) == 1 or step == run[1][1].data_ptr() - first.data_ptr())


def _geometry(
    group: LayerGroup,
    tensors: Sequence[Tensor],
    kernel: KernelLayout,
    granularity: Granularity,
    region: int,
    worker: WorkerHeads,
) -> Geometry:
    first = tensors[0]
    blocks, heads, tokens, width = first.shape
    size = first.element_size()
    page, head, token, element = (stride * size for stride in first.stride())
    # Kernels that store by token keep K and V of a (head, token) contiguous: one plane is enough.
    both = group.kind in ("full", "sliding_window") and kernel != "tokens"
    if both and ((element, token) != (size, width * size) or (heads > 1 and head < tokens * token) or width % 2):
        raise ConfigError("kv_cache", f"group {group.name!r}: a (block, head) page is not one piece of K and V")
    if both:
        width //= 2
    if granularity == "token" and kernel == "unknown":
        raise ConfigError("granularity", f"group {group.name!r}: only whole pages of its kernel are known")
    storage = first.untyped_storage()
    cut: Cut = "whole" if group.kind == "mla" else "heads"
    whole = Plane(
        name="latent" if group.kind == "mla" else "kv",
        dtype=dtype_name(first.dtype),
        cut=cut,
        num_heads=heads,
        head_dim=width,
        layer_stride=layer_stride(tensors),
        page_stride=page,
        token_stride=width * size if both else token,
        head_stride=head,
        element_stride=element,
        first_head=worker.first_head(group.owner, heads) if cut == "heads" else 0,
        base=first.data_ptr() - storage.data_ptr(),
        tile=1 if kernel == "tokens" else tokens,
    )
    planes = [whole]
    if both:
        change = msgspec.structs.replace
        planes = [change(whole, name="k"), change(whole, name="v", base=whole.base + tokens * width * size)]
        if granularity == "token":
            keys = change(planes[0], tile=1, token_stride=size, element_stride=tokens * size)
            planes = [keys, change(planes[1], tile=1)]
    return Geometry(
        group=group.name,
        region=region,
        region_bytes=storage.nbytes(),
        num_pages=blocks,
        page_size=tokens,
        layer_ids=group.layer_ids,
        planes=tuple(planes),
    )


def kernel_pages(table: Sequence[int], blocks_per_page: int) -> list[int]:
    """The kernel's pages of vLLM's block table: each block is `blocks_per_page` consecutive pages, block 0 is null."""
    if blocks_per_page == 1:
        return list(table)
    pages = np.asarray(table, dtype=np.int64)[:, None] * blocks_per_page + np.arange(blocks_per_page)
    pages[np.asarray(table) == 0] = 0
    return [int(page) for page in pages.reshape(-1)]
