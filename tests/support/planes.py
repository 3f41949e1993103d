"""Geometries whose planes are changed."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.kv.geometry import Geometry


def with_planes(geometry: Geometry, **changes: Any) -> Geometry:
    """`geometry` with the same change in each of its planes."""
    planes = tuple(msgspec.structs.replace(plane, **changes) for plane in geometry.planes)
    return msgspec.structs.replace(geometry, planes=planes)
