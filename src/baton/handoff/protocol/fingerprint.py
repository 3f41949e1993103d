"""What must be equal on two engines before KV may go from one to the other.

A fingerprint is a flat `{field: value}` of strings, so that a difference is named field by field. Page size,
page count and byte layout are not in it: the planner translates between those.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import IncompatiblePeerError
from baton.handoff.plan.planner import RankGeometry

_ABSENT = "absent"


def geometry_fields(geometries: Mapping[str, RankGeometry]) -> dict[str, str]:
    """The fields of each group that the planner cannot translate: its layers and planes, and what a plane is."""
    fields: dict[str, str] = {}
    for name, rank in sorted(geometries.items()):
        geometry = rank.geometry
        fields[f"group.{name}.layer_ids"] = ",".join(map(str, sorted(geometry.layer_ids)))
        fields[f"group.{name}.planes"] = ",".join(plane.name for plane in geometry.planes)
        for plane in geometry.planes:
            at = f"group.{name}.{plane.name}"
            fields[f"{at}.dtype"] = plane.dtype
            fields[f"{at}.cut"] = plane.cut
            fields[f"{at}.heads"] = f"{plane.first_head}-{plane.last_head}"
            fields[f"{at}.head_dim"] = str(plane.head_dim)
            fields[f"{at}.tile"] = str(plane.tile)
    return fields


def compare(here: Mapping[str, str], peer: Mapping[str, str]) -> None:
    """Raise `IncompatiblePeerError` naming every field that differs or that one side lacks."""
    names = sorted(set(here) | set(peer))
    pairs = {name: (here.get(name, _ABSENT), peer.get(name, _ABSENT)) for name in names}
    differing: dict[str, tuple[object, object]] = {name: pair for name, pair in pairs.items() if len(set(pair)) > 1}
    if differing:
        raise IncompatiblePeerError(differing)
