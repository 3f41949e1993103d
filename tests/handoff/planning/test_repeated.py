"""A plan that is used again is the one that would be made."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.planner import CopyList, plan_copies
from baton.handoff.plan.repeated import CopyPlanner
from baton.handoff.plan.topology import RankGeometry
from baton.kv.geometry import Geometry, Plane
from baton.kv.interval import ALL_LAYERS, Interval

TOKENS, DIM, PAGES = Interval(3, 21), 4, 16
SOURCE_PAGES, DEST_PAGES = [6, 1, 4, 2, 7, 3], [5, 9, 2, 14, 3, 11, 8, 1, 13, 4, 7]


def geometry(name: str, layer: int, region: int, page_size: int, heads: int, first: int = 0) -> Geometry:
    token = heads * DIM * 4
    plane = Plane(
        name=name,
        dtype="float32",
        cut="heads",
        num_heads=heads,
        head_dim=DIM,
        layer_stride=PAGES * page_size * token,
        page_stride=page_size * token,
        token_stride=token,
        head_stride=DIM * 4,
        element_stride=4,
        first_head=first,
    )
    return Geometry(
        group=f"{name}.{layer}",
        region=region,
        region_bytes=PAGES * page_size * token,
        num_pages=PAGES,
        page_size=page_size,
        layer_ids=(layer,),
        planes=(plane,),
    )


def group(name: str, layer: int, region: int) -> tuple[list[RankGeometry], RankGeometry]:
    """Two ranks with two heads each send to one with four, whose regions are in another order."""
    sources = [
        RankGeometry(rank=rank, geometry=geometry(name, layer, region, 4, heads=2, first=2 * rank)) for rank in range(2)
    ]
    return sources, RankGeometry(rank=0, geometry=geometry(name, layer, 7 - region, 2, heads=4))


GROUPS = [group(name, layer, 2 * layer + index) for layer in range(2) for index, name in enumerate("kv")]


def same(one: CopyList | None, other: CopyList) -> bool:
    assert one is not None
    regions = (one.source_region, one.dest_region) == (other.source_region, other.dest_region)
    columns = ("source_offset", "dest_offset", "nbytes")
    return regions and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def again(one: CopyList | None, other: CopyList | None) -> bool:
    """Whether both are of one plan."""
    assert one is not None
    assert other is not None
    return one.nbytes is other.nbytes


@pytest.mark.parametrize("rank", [0, 1])
def test_groups_of_one_shape_and_table_are_planned_once(rank: int) -> None:
    planner, first = CopyPlanner(), None
    for sources, dest in GROUPS:
        found = planner.plan(sources, dest, SOURCE_PAGES, DEST_PAGES, TOKENS, ALL_LAYERS, rank)
        assert same(found, plan_copies(sources, dest, SOURCE_PAGES, DEST_PAGES, TOKENS)[rank])
        first = first or found
        assert again(first, found)


@pytest.mark.parametrize("change", ["source pages", "dest pages", "tokens", "rank", "layers", "heads", "page size"])
def test_whatever_a_plan_depends_on_makes_another(change: str) -> None:
    planner, (sources, dest) = CopyPlanner(), GROUPS[0]
    first = planner.plan(sources, dest, SOURCE_PAGES, DEST_PAGES, TOKENS, ALL_LAYERS, 0)
    source_pages, dest_pages = SOURCE_PAGES, DEST_PAGES
    tokens, layers, rank = TOKENS, ALL_LAYERS, 0
    match change:
        case "source pages":
            source_pages = SOURCE_PAGES[::-1]
        case "dest pages":
            dest_pages = DEST_PAGES[::-1]
        case "tokens":
            tokens = Interval(3, 20)
        case "rank":
            rank = 1
        case "layers":
            layers = Interval(0, 1)
        case "heads":
            sources = [RankGeometry(rank=0, geometry=geometry("k", 0, 0, 4, heads=4))]
        case "page size":
            dest, dest_pages = RankGeometry(rank=0, geometry=geometry("k", 0, 7, 4, heads=4)), DEST_PAGES
    want = plan_copies(sources, dest, source_pages, dest_pages, tokens, layers)[rank]
    found = planner.plan(sources, dest, source_pages, dest_pages, tokens, layers, rank)
    assert same(found, want)
    assert not again(first, found)


def test_equal_tables_of_another_request_are_planned_again() -> None:
    planner, (sources, dest) = CopyPlanner(), GROUPS[0]
    one, other = (planner.plan(sources, dest, list(SOURCE_PAGES), DEST_PAGES, TOKENS, ALL_LAYERS, 0) for _ in range(2))
    assert not again(one, other)


def test_ranks_that_do_not_match_are_refused_after_a_plan_for_those_that_do() -> None:
    planner, (sources, dest) = CopyPlanner(), GROUPS[0]
    planner.plan(sources, dest, SOURCE_PAGES, DEST_PAGES, TOKENS, ALL_LAYERS, 0)
    (other, _), (_, own) = GROUPS[1], GROUPS[2]
    with pytest.raises(IncompatiblePeerError):
        planner.plan(other, own, SOURCE_PAGES, DEST_PAGES, TOKENS, ALL_LAYERS, 0)


def test_a_table_that_is_refused_is_refused_each_time() -> None:
    planner, bad = CopyPlanner(), [0, *DEST_PAGES[1:]]
    for sources, dest in GROUPS:
        with pytest.raises(ProtocolError, match=f"group '{dest.geometry.group}': the null page"):
            planner.plan(sources, dest, SOURCE_PAGES, bad, Interval(0, 21), ALL_LAYERS, 0)


def test_a_group_of_several_planes_is_planned_each_time() -> None:
    own = geometry("k", 0, 0, 4, heads=1)
    both = (own.planes[0], msgspec.structs.replace(own.planes[0], name="v", base=own.region_bytes))
    whole = RankGeometry(rank=0, geometry=msgspec.structs.replace(own, planes=both, region_bytes=2 * own.region_bytes))
    planner = CopyPlanner()
    one, other = (planner.plan([whole], whole, SOURCE_PAGES, SOURCE_PAGES, TOKENS, ALL_LAYERS, 0) for _ in range(2))
    assert same(other, plan_copies([whole], whole, SOURCE_PAGES, SOURCE_PAGES, TOKENS)[0])
    assert not again(one, other)
