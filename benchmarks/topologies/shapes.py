"""Models as groups of layers, for tables that need no weights: attention of every kind, each with its drafter."""

from __future__ import annotations

from collections.abc import Sequence

from baton.handoff.plan.planner import Instance, RankGeometry
from simulation.topologies import Layers, Part, Shape, instance

LATENT_DIM, ROPE_DIM = 512, 64


def heads(name: str, layers: int, num_heads: int, head_dim: int, draft: bool = False) -> Layers:
    """Attention with K and V of `num_heads` heads."""
    parts = (Part("k", "heads", num_heads, head_dim), Part("v", "heads", num_heads, head_dim))
    return Layers(name, parts, tuple(range(layers)), "draft" if draft else "target")


def latents(name: str, layers: int, draft: bool = False) -> Layers:
    """MLA, with DeepSeek's dimensions."""
    part = Part("latent", "whole", 1, LATENT_DIM + ROPE_DIM)
    return Layers(name, (part,), tuple(range(layers)), "draft" if draft else "target")


def states(name: str, layers: int, groups: int = 1) -> Layers:
    """Mamba-2: 64 heads of 64 channels, states of 128, convolutions over x, B and C of 3 earlier inputs."""
    parts = (
        Part("conv x", "channels", 64 * 64, 3, unit=64),
        Part("conv b", "channels", groups * 128, 3, unit=128),
        Part("conv c", "channels", groups * 128, 3, unit=128),
        Part("ssm", "heads", 64, 64 * 128, "float32"),
    )
    return Layers(name, parts, tuple(range(100, 100 + layers)), page_size=1)


MIXES: dict[str, tuple[Layers, ...]] = {
    "MLA target, MHA drafter": (latents("target", 61), heads("draft", 1, 32, 128, draft=True)),
    "MLA target, MLA drafter": (latents("target", 61), latents("draft", 1, draft=True)),
    "GQA target with 8 KV heads, MHA drafter": (heads("target", 61, 8, 128), heads("draft", 1, 32, 128, draft=True)),
    "GQA target with 2 KV heads, GQA drafter with 2": (
        heads("target", 61, 2, 128),
        heads("draft", 1, 2, 128, draft=True),
    ),
}
HYBRID = (heads("target", 4, 8, 128), states("state", 36))


def two(groups: Sequence[Layers], p: Shape, d: Shape, num_pages: int = 1100) -> tuple[Instance, Instance]:
    return instance(groups, p, num_pages), instance(groups, d, num_pages)


def in_turn(one: Instance, dp_rank: int) -> Instance:
    """Data-parallel rank number `dp_rank` of engines that are each cut like `one`."""
    groups = {
        group: [
            RankGeometry(rank=found.rank, geometry=found.geometry, turn=dp_rank * one.num_ranks + found.rank)
            for found in ranks
        ]
        for group, ranks in one.groups.items()
    }
    return Instance(rank=one.rank, groups=groups, sampling=one.sampling)


def minimum(groups: Sequence[Layers], d: Shape, tokens: int) -> int:
    """Bytes that D's ranks hold of `tokens`, each once, counted from `Layers` alone, without geometry."""
    total = 0
    for group in groups:
        tp = (d.draft_tp or d.tp) if group.owner == "draft" else d.tp
        entries = 1 if group.page_size else tokens
        for part in group.parts:
            itemsize = 4 if part.dtype == "float32" else 2
            units = part.num_heads // part.unit
            copies = tp if part.cut == "whole" else max(1, tp // units)
            total += entries * len(group.layer_ids) * part.num_heads * part.head_dim * itemsize * copies
    return total
