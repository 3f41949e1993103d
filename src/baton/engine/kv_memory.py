"""The KV memory of one engine: which groups its layers form, how many pages each has, and where they lie."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from baton.engine.config import EngineConfig, block_sizes
from baton.engine.group_memory import GroupMemory
from baton.engine.pool_size import Memory, PoolSize, pool_size
from baton.errors import ConfigError
from baton.kv.interval import Kind
from baton.kv.spec import GroupSpec, Owner, Planes, PlaneSpec, kv_planes, latent_planes
from baton.models.cache import KVLayerSpec, LatentLayerSpec, LayerSpec, StateLayerSpec
from baton.transports.base import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """`regions` as a transport knows them (none without one), and the same as tensors by group."""

    groups: list[GroupSpec]
    size: PoolSize
    regions: list[np.ndarray]
    kv: dict[str, GroupMemory]


def kv_memory(
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    draft_layers: Sequence[LayerSpec],
    draft_modules: Sequence[int | None],
    dtype: str,
    max_position: int,
    before: Memory,
    uses_shm: bool,
    transport: Transport | None,
    progress: Callable[[str], None],
) -> KVMemory:
    """Size and allocate the pages of an engine that has loaded its weights; `before`: memory as it was before that.

    `draft_modules`: as `Drafter.kv_modules`. `max_position` is the checkpoint's context. Raises ConfigError,
    TransportError.
    """
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError("max_model_len", f"must be at most the checkpoint's {max_position}")
    sizes = block_sizes(config.block_size)
    groups = _groups(layers, [0] * len(layers), "target", sizes, dtype)
    groups += _groups(draft_layers, draft_modules, "draft", sizes, dtype)
    for group in groups:
        if group.kind == "state" and (named := sizes.keys() & {group.name, group.kind}):
            raise ConfigError("block_size", f"{min(named)!r}: states have no tokens to a page; see --mamba-block-size")
    known = {name for group in groups if group.kind != "state" for name in _names(group)}
    if unknown := sizes.keys() - known:
        raise ConfigError("block_size", f"there is no group {min(unknown)!r}; there are {', '.join(sorted(known)[1:])}")
    device = torch.device(config.device)
    now = Memory.measure(device, uses_shm)
    size = pool_size(config, before, now, groups, config.num_drafts, max_position)
    if size.lowered:
        log.warning("%s", size)
    num_bytes = sum(group.page_bytes * size.num_pages[group.name] for group in groups)
    most_pages = max(size.num_pages.values())
    progress(f"{size}; allocating {most_pages} pages of {config.block_size} tokens, {num_bytes >> 20} MiB")
    return KVMemory(groups, size, *_allocate(groups, size.num_pages, transport, device))


def _groups(
    layers: Sequence[LayerSpec], modules: Sequence[int | None], owner: Owner, sizes: Mapping[str, int], dtype: str
) -> list[GroupSpec]:
    """Layers that keep the same, and look equally far, form one group."""
    by_spec: dict[tuple[LayerSpec, int | None], list[int]] = {}
    for layer_id, (layer, module) in enumerate(zip(layers, modules, strict=True)):
        by_spec.setdefault((layer, module), []).append(layer_id)
    groups: list[GroupSpec] = []
    for (layer, module), ids in by_spec.items():
        kind, planes = _kept(layer, dtype)
        group = GroupSpec(
            name=(owner if owner == "draft" else f"{owner}.{kind}") + (f".{len(groups)}" if groups else ""),
            owner=owner,
            module=module,
            kind=kind,
            planes=planes,
            page_size=1,
            window=layer.window if isinstance(layer, KVLayerSpec) else None,
            layer_ids=tuple(ids),
        )
        if kind != "state":
            size = next(sizes[name] for name in _names(group) if name in sizes)
            group = msgspec.structs.replace(group, page_size=size)
        groups.append(group)
    return groups


def _names(group: GroupSpec) -> tuple[str, ...]:
    """What a block size may call a group, the narrowest name first."""
    return group.name, group.owner, group.kind, ""


def _kept(layer: LayerSpec, dtype: str) -> tuple[Kind, Planes]:
    match layer:
        case KVLayerSpec(num_kv_heads, head_dim, window):
            return "full" if window is None else "sliding_window", kv_planes(num_kv_heads, head_dim, dtype)
        case LatentLayerSpec(latent_dim, rope_dim):
            return "mla", latent_planes(latent_dim, rope_dim, dtype)
        case StateLayerSpec(planes):
            parts = (PlaneSpec(p.name, p.dtype or dtype, p.num_heads, p.head_dim, p.cut) for p in planes)
            return "state", tuple(parts)


def _allocate(
    groups: Sequence[GroupSpec], num_pages: Mapping[str, int], transport: Transport | None, device: torch.device
) -> tuple[list[np.ndarray], dict[str, GroupMemory]]:
    if transport is None:
        return [], {group.name: GroupMemory.zeros(group, num_pages[group.name], device) for group in groups}
    if device.type != "cpu":
        raise ConfigError("kv_transfer_config.kv_transport", f"{transport.scheme} moves host memory only")
    regions: list[np.ndarray] = []
    kv: dict[str, GroupMemory] = {}
    for group in groups:
        region = transport.allocate(group.name, num_pages[group.name] * group.page_bytes)
        regions.append(region)
        kv[group.name] = GroupMemory.over(group, torch.from_numpy(region).view(-1, group.page_bytes))
    return regions, kv
