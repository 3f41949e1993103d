"""What must be equal on two engines before KV may go from one to the other.

A fingerprint is a flat `{field: value}` of strings, so that a difference is named field by field. Page size,
page count and byte layout are not in it: the planner translates between those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from baton.errors import IncompatiblePeerError
from baton.handoff.plan.planner import RankGeometry

_ABSENT = "absent"


def geometry_fields(geometries: Mapping[str, RankGeometry]) -> dict[str, str]:
    """The fields of each group that the planner cannot translate: dtype, layers, head size, halves, tile."""
    fields: dict[str, str] = {}
    for name, rank in sorted(geometries.items()):
        geometry = rank.geometry
        fields[f"group.{name}.dtype"] = geometry.dtype
        fields[f"group.{name}.layer_ids"] = ",".join(map(str, sorted(geometry.layer_ids)))
        fields[f"group.{name}.head_dim"] = str(geometry.head_dim)
        fields[f"group.{name}.halves"] = str(geometry.num_halves)
        fields[f"group.{name}.heads"] = f"{geometry.first_head}-{geometry.last_head}"
        fields[f"group.{name}.tile"] = str(geometry.tile)
    return fields


def compare(here: Mapping[str, str], peer: Mapping[str, str]) -> None:
    """Raise `IncompatiblePeerError` naming every field that differs or that one side lacks."""
    names = sorted(set(here) | set(peer))
    pairs = {name: (here.get(name, _ABSENT), peer.get(name, _ABSENT)) for name in names}
    differing: dict[str, tuple[object, object]] = {name: pair for name, pair in pairs.items() if len(set(pair)) > 1}
    if differing:
        raise IncompatiblePeerError(differing)


def digest(fields: Mapping[str, str]) -> str:
    """32 hex digits that are equal exactly when all fields are: for display and quick comparison."""
    encoded = msgspec.msgpack.encode(dict(fields), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
