"""The KV memory of one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from baton.drafters.base import Drafter
from baton.engine.config import EngineConfig, block_sizes
from baton.engine.memory.device_memory import device_region
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.memory.pool_size import Memory, PoolSize, pool_size
from baton.errors import ConfigError
from baton.kv.interval import Kind
from baton.kv.spec import GroupSpec, Owner, Planes, PlaneSpec, kv_planes, latent_planes
from baton.models.base import CausalLM
from baton.models.layer_cache import (
    EmptyLayerSpec,
    KVLayerSpec,
    LatentLayerSpec,
    LayerSpec,
    PartsLayerSpec,
    SharedLayerSpec,
    StateLayerSpec,
    TokenPart,
)
from baton.models.layers.parallel import Share, share_of_heads, stage_layers
from baton.transports.base import Region, Transport

log = logging.getLogger(__name__)

GroupLayers = tuple[GroupSpec, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class KVMemory:
    """`parts`: by rank. `kv`: rank 0's memory by group. `regions`: by rank, in the order of its parts; empty without
    transports."""

    parts: list[list[GroupLayers]]
    size: PoolSize
    regions: list[list[Region]]
    kv: dict[str, GroupMemory]


def model_groups(config: EngineConfig, model: CausalLM, drafter: Drafter | None) -> list[GroupSpec]:
    """The groups over all ranks. Raises `ConfigError`."""
    # Parameters of a stage may begin with a norm in float32.
    sizes, dtype = block_sizes(config.block_size), str(model.build.dtype).removeprefix("torch.")
    groups = _groups(model.kv_layers, [0] * len(model.kv_layers), "target", sizes, dtype)
    if drafter is not None:
        groups += _groups(drafter.kv_layers, drafter.kv_modules, "draft", sizes, dtype)
    for group in groups:
        # A drafter's first group is named after its owner: the size may be meant for others.
        if group.kind == "state" and (named := sizes.keys() & {group.name, group.kind} - {group.owner}):
            raise ConfigError("block_size", f"{min(named)!r}: states have no tokens to a page; see --mamba-block-size")
    known = {name for group in groups if group.kind != "state" for name in _names(group)}
    # The empty name is the size for all groups; it applies to none in a model of states alone.
    if unknown := sizes.keys() - known - {""}:
        there = ", ".join(sorted(known)[1:]) or "none with pages"
        raise ConfigError("block_size", f"there is no group {min(unknown)!r}; there are {there}")
    return groups


def parts_of(groups: Sequence[GroupSpec], config: EngineConfig, num_layers: int, rank: int) -> list[GroupLayers]:
    """A rank's parts, each with the model's number of the first head of each plane.

    A stage's tensor ranks share the heads or channels of each plane that is cut. All ranks of stage 0 hold the whole
    drafter. Ranks are counted stage by stage.
    """
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    stage, tensor_rank = divmod(rank, size)
    layers, parts = stage_layers(num_layers, stage, stages), []
    for group in groups:
        if group.owner == "draft":
            if stage == 0:
                parts.append((group, (0,) * len(group.planes)))
            continue
        own = tuple(layer for layer in group.layer_ids if layer in layers)
        if not own:
            continue
        shares = [
            Share(0, plane.num_heads, plane.num_heads)
            if plane.cut == "whole"
            else share_of_heads(plane.num_heads, tensor_rank, size)
            for plane in group.planes
        ]
        planes = tuple(
            msgspec.structs.replace(plane, num_heads=share.length)
            for plane, share in zip(group.planes, shares, strict=True)
        )
        part = msgspec.structs.replace(group, layer_ids=own, planes=planes)
        parts.append((part, tuple(share.start for share in shares)))
    return parts


def kv_memory(
    config: EngineConfig,
    whole: Sequence[GroupSpec],
    num_layers: int,
    max_position: int,
    before: Memory,
    uses_shm: bool,
    transports: Sequence[Transport],
    progress: Callable[[str], None],
) -> KVMemory:
    """Size and allocate the pages, once weights are loaded.

    `whole`: as `model_groups`. `before`: memory before loading. `transports`: one per rank, or none. `num_layers` and
    `max_position` (the context): the checkpoint's. Raises `ConfigError`, `TransportError`.
    """
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            "max_model_len", f"must be at most the checkpoint's {max_position}, got {config.max_model_len}"
        )
    parts = [parts_of(whole, config, num_layers, rank) for rank in range(config.num_ranks)]
    # All ranks have the same number of pages: divide memory by the largest.
    held = [[group for group, _ in part] for part in parts]
    groups = [max((g for part in held for g in part if g.name == w.name), key=lambda g: g.page_bytes) for w in whole]
    device = torch.device(config.device)
    now = Memory.measure(device, uses_shm)
    one_rank = replace(config, engines_per_host=(config.engines_per_host or 1) * config.num_ranks)
    size = pool_size(one_rank, before, now, groups, config.num_lookahead_slots, max_position)
    if size.lowered:
        log.warning("%s", size)
    num_bytes = sum(group.page_bytes * size.num_pages[group.name] for group in groups)
    most_pages = max(size.num_pages.values())
    progress(f"{size}; allocating {most_pages} pages of {config.block_size} tokens, {num_bytes >> 20} MiB")
    if not transports:
        return KVMemory(
            parts, size, [], {g.name: GroupMemory.zeros(g, size.num_pages[g.name], device) for g in held[0]}
        )
    if device.type == "cuda":
        kv = {g.name: GroupMemory.zeros(g, size.num_pages[g.name], device) for g in held[0]}
        return KVMemory(parts, size, [[device_region(kv[g.name].pages) for g in held[0]]], kv)
    regions: list[list[Region]] = [
        [transport.allocate(g.name, size.num_pages[g.name] * g.page_bytes) for g in own]
        for transport, own in zip(transports, held, strict=True)
    ]
    first = zip(held[0], regions[0], strict=True)
    kv = {g.name: GroupMemory.over(g, torch.from_numpy(region).view(-1, g.page_bytes)) for g, region in first}
    return KVMemory(parts, size, regions, kv)


def _groups(
    layers: Sequence[LayerSpec], modules: Sequence[int | None], owner: Owner, sizes: Mapping[str, int], dtype: str
) -> list[GroupSpec]:
    """Layers with the same spec, or part of one, and module form one group."""
    by_spec: dict[tuple[LayerSpec | TokenPart, int | None], list[int]] = {}
    for layer_id, (layer, module) in enumerate(zip(layers, modules, strict=True)):
        if not isinstance(layer, SharedLayerSpec | EmptyLayerSpec):
            for part in layer.parts if isinstance(layer, PartsLayerSpec) else (layer,):
                by_spec.setdefault((part, module), []).append(layer_id)
    groups: list[GroupSpec] = []
    for (spec, module), ids in by_spec.items():
        kind, planes = _kept(spec, dtype)
        rate = spec.rate if isinstance(spec, TokenPart) else 1
        group = GroupSpec(
            name=(owner if owner == "draft" else f"{owner}.{kind}") + (f".{len(groups)}" if groups else ""),
            owner=owner,
            module=module,
            kind=kind,
            planes=planes,
            page_size=rate,
            window=_reach(spec),
            layer_ids=tuple(ids),
            rate=rate,
        )
        if kind != "state":
            size = next(sizes[name] for name in _names(group) if name in sizes)
            # Pages hold whole entries.
            group = msgspec.structs.replace(group, page_size=-(-size // rate) * rate)
        groups.append(group)
    return groups


def _reach(layer: LayerSpec | TokenPart) -> int | None:
    """How many of the last entries the next row and a drafter need; None: all."""
    if isinstance(layer, TokenPart):
        return layer.window
    if not isinstance(layer, KVLayerSpec) or layer.window is None:
        return None
    return layer.window + layer.lookback


def _names(group: GroupSpec) -> tuple[str, ...]:
    """Names for `--block-size`, most specific first."""
    return group.name, group.owner, group.kind, ""


def _kept(layer: LayerSpec | TokenPart, dtype: str) -> tuple[Kind, Planes]:
    match layer:
        case KVLayerSpec(num_kv_heads, head_dim, window):
            return "full" if window is None else "sliding_window", kv_planes(num_kv_heads, head_dim, dtype)
        case LatentLayerSpec(latent_dim, rope_dim, index_dim):
            return "mla", latent_planes(latent_dim, rope_dim, dtype, index_dim)
        case StateLayerSpec(planes):
            parts = (PlaneSpec(p.name, p.dtype or dtype, p.num_heads, p.head_dim, p.cut) for p in planes)
            return "state", tuple(parts)
        case TokenPart(widths, window, rate):
            # A token has its share of an entry, rounded up.
            shares = tuple(PlaneSpec(name, dtype, 1, -(-width // rate), "whole") for name, width in widths)
            return "compressed" if rate > 1 else "mla" if window is None else "sliding_window", shares
        case SharedLayerSpec() | EmptyLayerSpec() | PartsLayerSpec():
            raise AssertionError("not what one group keeps")
