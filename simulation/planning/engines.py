"""Hybrids for `simulation.planning.check`, cut as an engine cuts them: `baton.engine.memory.kv_memory` gives each
rank's share of each plane.

Ranks share the x of a Mamba-2 layer by the recurrence's heads, and B and C by groups of heads, or not at all if there
is one group. Attention heads are replicated if there are fewer than ranks. So on one rank each plane has a share of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from baton.engine.memory.kv_memory import model_groups, parts_of
from baton.handoff.plan.topology import Instance, RankGeometry
from baton.kv.geometry import Geometry
from baton.kv.spec import GroupSpec
from baton.models.layer_cache import KVLayerSpec, LatentLayerSpec, LayerSpec
from baton.models.layers.mamba2 import Mamba2Spec
from simulation.topologies import Layers, Part, place, random_layout

_TP = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The groups of a model with states, over all ranks. `fits`: tensor-parallel sizes by which it can be cut."""

    groups: list[GroupSpec]
    num_layers: int
    fits: tuple[int, ...]


def hybrid(random: Random) -> Hybrid:
    """Draw a model: some Mamba-2 layers, some attention layers, perhaps a drafter."""
    num_groups = random.choice((1, 2, 4, 8))
    mamba = Mamba2Spec(
        num_heads=num_groups * random.choice((1, 2, 3)) * (4 if num_groups < 4 else 1),
        head_dim=random.randint(1, 3),
        num_groups=num_groups,
        state_size=random.randint(1, 3),
        taps=random.randint(2, 4),
    )
    kv_heads = random.choice((1, 2, 4))
    attention: LayerSpec = KVLayerSpec(kv_heads, random.randint(1, 3), random.choice((None, 4)))
    if random.random() < 0.2:
        attention = LatentLayerSpec(random.randint(1, 4), 1)
    layers = [
        mamba.state_spec,
        attention,
        *random.choices((mamba.state_spec, mamba.state_spec, attention), k=random.randint(0, 4)),
    ]
    random.shuffle(layers)
    dtype = random.choice((torch.bfloat16, torch.float32))
    model: Any = SimpleNamespace(kv_layers=layers, build=SimpleNamespace(dtype=dtype))
    drafter: Any = SimpleNamespace(kv_layers=[KVLayerSpec(random.choice((1, 2)), 2, None)], kv_modules=[1])
    config: Any = SimpleNamespace(block_size=1)
    groups = model_groups(config, model, drafter if random.random() < 0.5 else None)
    # Attention heads may be replicated on several ranks; a state's heads and groups may not.
    cut = (mamba.num_heads,) if num_groups == 1 else (mamba.num_heads, num_groups)
    fits = [tp for tp in _TP if not any(n % tp for n in cut) and (kv_heads % tp == 0 or tp % kv_heads == 0)]
    return Hybrid(groups, len(layers), tuple(fits))


def as_layers(group: GroupSpec) -> Layers:
    """The same group for engines that cut it otherwise."""
    parts = tuple(Part(p.name, p.cut, p.num_heads, p.head_dim, p.dtype) for p in group.planes)
    return Layers(group.name, parts, group.layer_ids, group.owner, 1 if group.kind == "state" else None)


def engine(random: Random, model: Hybrid, page_size: int, num_pages: int) -> Instance:
    """An engine over any tensor ranks and stages that fit."""
    tp, stages = random.choice(model.fits), random.randint(1, min(3, model.num_layers))
    config: Any = SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=stages)
    layout = random_layout(random, tile=1) if random.random() < 0.5 else None
    found: dict[str, list[RankGeometry]] = {group.name: [] for group in model.groups}
    for rank in range(tp * stages):
        for region, (part, first_heads) in enumerate(parts_of(model.groups, config, model.num_layers, rank)):
            own, size = as_layers(part), 1 if part.kind == "state" else page_size
            # As `baton.engine.ranks.agents` lays it out, or as another engine may lay out the same shares.
            spec = msgspec.structs.replace(part, page_size=size)
            geometry = Geometry.block_major(spec, num_pages, region=region, first_head=first_heads)
            if layout is not None:
                shares = [(plane.first_head, plane.num_heads) for plane in geometry.planes]
                geometry = place(own.name, own.parts, shares, own.layer_ids, num_pages, size, layout, region)
            found[part.name].append(RankGeometry(rank=rank, geometry=geometry))
    return Instance(rank=0, groups=found)
