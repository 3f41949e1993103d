"""Geometries whose planes are changed, and orders of axes that engines do not use."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.kv.geometry import Axis, Geometry

BLOCK_MAJOR_HND: tuple[Axis, ...] = ("page", "layer", "plane", "head", "token", "element")
LAYER_MAJOR_HND: tuple[Axis, ...] = ("layer", "plane", "page", "head", "token", "element")


def with_planes(geometry: Geometry, **changes: Any) -> Geometry:
    """`geometry` with the same change in each of its planes."""
    planes = tuple(msgspec.structs.replace(plane, **changes) for plane in geometry.planes)
    return msgspec.structs.replace(geometry, planes=planes)
