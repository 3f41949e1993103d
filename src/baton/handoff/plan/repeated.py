"""Plans of groups that differ only in their region, as K and V of SGLang's layers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from msgspec.structs import replace as with_fields

from baton.handoff.plan.planner import CopyList, RankGeometry, plan_copies
from baton.kv.interval import ALL_LAYERS, Interval

_Shape = tuple[RankGeometry, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    shape: _Shape
    rank: int
    tokens: Interval
    source_pages: list[int]
    dest_pages: list[int]
    copies: CopyList


class CopyPlanner:
    """Reuses the last plan for a group of the same shape, tokens and block tables (as objects). Not thread-safe."""

    def __init__(self) -> None:
        self._last: _Planned | None = None

    def plan(
        self,
        sources: Sequence[RankGeometry],
        dest: RankGeometry,
        source_pages: list[int],
        dest_pages: list[int],
        tokens: Interval,
        layers: Interval,
        rank: int,
    ) -> CopyList | None:
        """None if `rank` has nothing to send. Raises the errors of `plan_copies`."""
        shape = _shape_of(tuple(sources), dest) if layers is ALL_LAYERS else None
        last = self._last
        if (
            last is not None
            and (last.rank, last.tokens) == (rank, tokens)
            and last.source_pages is source_pages
            and last.dest_pages is dest_pages
            and last.shape == shape
        ):
            region = next(source.geometry.region for source in sources if source.rank == rank)
            return replace(last.copies, source_region=region, dest_region=dest.geometry.region)
        copies = plan_copies(sources, dest, source_pages, dest_pages, tokens, layers, rank).get(rank)
        if shape is not None and copies is not None:
            self._last = _Planned(shape, rank, tokens, source_pages, dest_pages, copies)
        return copies


@lru_cache(maxsize=1 << 13)
def _shape_of(sources: tuple[RankGeometry, ...], dest: RankGeometry) -> _Shape | None:
    """What a plan depends on besides regions. None unless the group is one plane of one layer on all ranks."""
    to, every = dest.geometry, (*sources, dest)
    if len(to.planes) != 1 or len(to.layer_ids) != 1:
        return None
    names = (to.group, to.layer_ids, to.planes[0].name)
    for geometry in (rank.geometry for rank in sources):
        if len(geometry.planes) != 1 or (geometry.group, geometry.layer_ids, geometry.planes[0].name) != names:
            return None
    return tuple(
        with_fields(
            rank,
            geometry=with_fields(
                rank.geometry,
                group="",
                region=0,
                layer_ids=(0,),
                planes=(with_fields(rank.geometry.planes[0], name="-"),),
            ),
        )
        for rank in every
    )
