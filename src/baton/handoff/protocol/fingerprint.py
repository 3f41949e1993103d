"""Decides by fingerprints whether KV may move between two engines.

They omit page size, page count and byte layout, which the planner translates.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.comparison import differing_facts
from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.topology import Instance, plane_fields

# Prefix of drafters' group names in Baton's engines.
_DRAFT_GROUPS = "draft"


def geometry_fields(instance: Instance) -> dict[str, str]:
    """Per group, over all ranks, what the planner cannot translate: layers, planes, and each plane's heads.

    Raises `ProtocolError` if ranks of one instance contradict each other.
    """
    fields: dict[str, str] = {}
    for group, ranks in sorted(instance.groups.items()):
        layers = {layer for rank in ranks for layer in rank.geometry.layer_ids}
        fields[f"group.{group}.layer_ids"] = ",".join(map(str, sorted(layers)))
        every = [plane_fields(rank.geometry) for rank in ranks]
        if any(found != every[0] for found in every):
            raise ProtocolError(f"group {group!r}: ranks of one engine have other planes")
        fields |= {f"group.{group}.{name}": str(value) for name, value in every[0].items()}
        for index, plane in enumerate(ranks[0].geometry.planes):
            planes = [rank.geometry.planes[index] for rank in ranks]
            first, last = min(each.first_head for each in planes), max(each.last_head for each in planes)
            fields[f"group.{group}.{plane.name}.heads"] = f"{first}-{last}"
    return fields


def compare_fingerprints(here: Mapping[str, str], peer: Mapping[str, str]) -> bool:
    """Whether the drafters' KV moves too (`differing_facts`).

    Raises `IncompatiblePeerError` naming every field that forbids a handoff.
    """
    differing, moves = differing_facts(here, peer)
    if differing:
        raise IncompatiblePeerError(differing)
    return moves


def target_groups(instance: Instance) -> set[str]:
    """All groups but the drafter's."""
    return {group for group in instance.groups if group.partition(".")[0] != _DRAFT_GROUPS}


def check_pair(here: Instance, peer: Instance) -> None:
    """Raises `IncompatiblePeerError` unless each side has every group, on its own rank only: without an
    `InstanceAgent`, missing bytes of other ranks would go unnoticed.
    """
    differing: dict[str, tuple[object, object]] = {}
    for group in sorted({*here.groups, *peer.groups}):
        ranks = [[found.rank for found in instance.groups.get(group, [])] for instance in (here, peer)]
        if ranks != [[here.rank], [peer.rank]]:
            differing[f"group.{group}.ranks"] = (ranks[0], ranks[1])
    if differing:
        raise IncompatiblePeerError(differing)
