"""Geometries with changed planes, and planes and axis orders that Baton's own pools do not have."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.handoff.plan.planner import RankGeometry
from baton.kv.geometry import Axis, Geometry
from baton.kv.spec import GroupSpec, Planes, PlaneSpec, kv_planes

BLOCK_MAJOR_HND: tuple[Axis, ...] = ("page", "layer", "plane", "head", "token", "element")
LAYER_MAJOR_HND: tuple[Axis, ...] = ("layer", "plane", "page", "head", "token", "element")


def with_planes(geometry: Geometry, **changes: Any) -> Geometry:
    """`geometry` with the same change in each of its planes."""
    planes = tuple(msgspec.structs.replace(plane, **changes) for plane in geometry.planes)
    return msgspec.structs.replace(geometry, planes=planes)


def split_latent_planes(latent_dim: int, rope_dim: int, dtype: str) -> Planes:
    """As `latent_planes`, with the rope key in a separate plane."""
    return PlaneSpec("latent", dtype, 1, latent_dim, "whole"), PlaneSpec("rope", dtype, 1, rope_dim, "whole")


def deep_rank(num_layers: int) -> RankGeometry:
    """Of group "deep"."""
    layer_ids, planes = tuple(range(num_layers)), kv_planes(1, 1, "uint8")
    spec = GroupSpec(name="deep", owner="target", kind="full", planes=planes, page_size=1, layer_ids=layer_ids)
    return RankGeometry(rank=0, geometry=Geometry.block_major(spec, 2))
