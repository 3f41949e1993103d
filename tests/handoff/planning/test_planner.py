"""The planner against a naive oracle, byte by byte: every wanted byte exactly once, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.planner import Instance, RankGeometry, plan_copies, senders
from baton.kv.geometry import (
    BLOCK_MAJOR_NHD,
    LAYER_MAJOR_NHD,
    Axis,
    CopyList,
    Geometry,
    Plane,
)
from baton.kv.interval import ALL_LAYERS, Interval
from baton.kv.spec import ITEMSIZE, Cut, GroupSpec, kv_planes, latent_planes
from testkit.handoffs.planes import BLOCK_MAJOR_HND, LAYER_MAJOR_HND, split_latent_planes, with_planes

ORDERS = [
    BLOCK_MAJOR_NHD,
    BLOCK_MAJOR_HND,
    LAYER_MAJOR_NHD,
    LAYER_MAJOR_HND,
    ("layer", "page", "plane", "element", "head", "token"),
]


def make(
    layers: tuple[int, ...] = (0, 1),
    heads: tuple[int, int] = (0, 2),
    *,
    pages: int = 12,
    page_size: int = 4,
    order: tuple[Axis, ...] = BLOCK_MAJOR_NHD,
    kind: Any = "full",
    head_dim: int = 2,
    region: int = 0,
    base: int = 0,
) -> Geometry:
    spec = GroupSpec(
        name="g",
        owner="target",
        kind=kind,
        planes=(
            kv_planes(heads[1] - heads[0], head_dim, "bfloat16")
            if kind == "full"
            else latent_planes(head_dim - 1, 1, "bfloat16")
        ),
        page_size=page_size,
        layer_ids=layers,
    )
    return Geometry.from_order(spec, pages, order, region=region, first_head=heads[0], base=base)


def ranks(*geometries: Geometry) -> list[RankGeometry]:
    return [RankGeometry(rank=i, geometry=g) for i, g in enumerate(geometries)]


def test_an_instance_needs_valid_geometries_of_distinct_ranks() -> None:
    good = make()
    bad = msgspec.structs.replace(good, num_pages=0)
    assert Instance(rank=0, groups={"g": ranks(good, good)}).check()
    with pytest.raises(ProtocolError, match="every count must be at least 1"):
        Instance(rank=0, groups={"g": ranks(good, bad)}).check()
    with pytest.raises(ProtocolError, match="a rank is named twice"):
        Instance(rank=0, groups={"g": [*ranks(good), *ranks(good)]}).check()


def addresses(geometry: Geometry, table: list[int], tokens: range) -> dict[tuple[int, ...], int]:
    """(layer id, plane, token, head id, byte of the row) -> byte offset, computed directly from the definition."""
    out = {}
    for layer_index, layer in enumerate(geometry.layer_ids):
        for index, plane in enumerate(geometry.planes):
            for t in tokens:
                for head in range(plane.num_heads):
                    for byte in range(plane.head_dim * plane.itemsize):
                        element, rest = divmod(byte, plane.itemsize)
                        at = plane.base + table[t // geometry.page_size] * plane.page_stride
                        at += layer_index * plane.layer_stride
                        at += t % geometry.page_size * plane.token_stride
                        at += head * plane.head_stride + element * plane.element_stride + rest
                        out[layer, index, t, plane.first_head + head, byte] = at
    return out


def check_against_oracle(
    sources: list[RankGeometry],
    dest: RankGeometry,
    here: list[int],
    there: list[int],
    tokens: Interval,
    layers: Interval = ALL_LAYERS,
) -> dict[int, CopyList]:
    planned = plan_copies(sources, dest, here, there, tokens, layers)
    wanted = addresses(dest.geometry, there, range(tokens.start, tokens.stop))
    of_dest = {offset: key for key, offset in wanted.items() if layers.start <= key[0] < layers.stop}
    have = {s.rank: addresses(s.geometry, here, range(tokens.start, tokens.stop)) for s in sources}
    written: dict[int, int] = {}
    for rank, copies in planned.items():
        assert len(copies) > 0
        assert (copies.nbytes > 0).all()
        columns = (copies.source_offset, copies.dest_offset, copies.nbytes)
        assert all(column.flags.c_contiguous for column in columns), "no transport takes it"
        assert (np.diff(copies.dest_offset) > 0).all()
        joined = (copies.source_offset[1:] == copies.source_offset[:-1] + copies.nbytes[:-1]) & (
            copies.dest_offset[1:] == copies.dest_offset[:-1] + copies.nbytes[:-1]
        )
        assert not joined.any(), "two neighbours could have been one run"
        for s, d, n in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
            for i in range(int(n)):
                assert int(d) + i not in written, "written twice"
                written[int(d) + i] = rank
                assert have[rank][of_dest[int(d) + i]] == int(s) + i
    assert set(written) == set(of_dest)
    return planned


@dataclass(slots=True)
class Case:
    sources: list[RankGeometry]
    dests: list[RankGeometry]
    here: list[int]
    there: list[int]
    tokens: Interval


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_layers, num_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(["full", "mla"])) if num_heads == 1 else "full"

    def side() -> list[RankGeometry]:
        tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, num_layers))
        order, page_size = draw(st.sampled_from(ORDERS)), draw(st.integers(1, 5))
        cuts = [round(i * num_layers / pp) for i in range(pp + 1)]
        made = []
        for stage in range(pp):
            for shard in range(tp):
                width = max(num_heads // tp, 1)
                head = shard * num_heads // tp if tp <= num_heads else shard // (tp // num_heads)
                layers = tuple(range(cuts[stage], cuts[stage + 1]))
                made.append(make(layers, (head, head + width), order=order, page_size=page_size, kind=kind, base=4))
        return ranks(*made)

    sources, dests = side(), side()
    start = draw(st.integers(0, 12))
    tokens = Interval(start, start + draw(st.integers(1, 9)))

    def table(page_size: int) -> list[int]:
        first, count = tokens.start // page_size, -(-tokens.stop // page_size)
        pages = draw(st.permutations(range(1, count - first + 3)))[: count - first]
        return [0] * first + pages

    here, there = (table(side[0].geometry.page_size) for side in (sources, dests))
    grow = max(*here, *there) + 1

    def fit(side: list[RankGeometry], pages: int) -> list[RankGeometry]:
        order = draw(st.sampled_from(ORDERS))
        out = []
        for each in side:
            g = each.geometry
            size = make(
                g.layer_ids,
                (g.planes[0].first_head, g.planes[0].last_head),
                order=order,
                page_size=g.page_size,
                kind=kind,
                base=4,
                pages=pages,
            )
            out.append(RankGeometry(rank=each.rank, geometry=size))
        return out

    return Case(fit(sources, grow + 1), fit(dests, grow), here, there, tokens)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases())
def test_every_wanted_byte_exactly_once(case: Case) -> None:
    for dest in case.dests:
        planned = check_against_oracle(case.sources, dest, case.here, case.there, case.tokens)
        assert tuple(planned) == senders(case.sources, dest)


def test_contiguous_pages_are_one_run() -> None:
    whole = ranks(make(pages=20))
    planned = plan_copies(whole, whole[0], range(3, 11), range(8, 16), Interval(0, 32))
    assert planned[0].nbytes.tolist() == [8 * whole[0].geometry.planes[0].page_stride]


def test_runs_of_a_fragmented_plan_are_pages() -> None:
    whole = ranks(make(pages=40))
    planned = plan_copies(whole, whole[0], range(1, 39, 2), range(1, 20), Interval(0, 76))
    assert planned[0].nbytes.tolist() == [whole[0].geometry.planes[0].page_stride] * 19


def test_a_prefix_hit_in_the_middle_of_a_page_and_a_lookahead_page() -> None:
    # 8 tokens fill exactly two pages; the third page is lookahead and must stay untouched.
    whole = ranks(make(), make())[:1]
    planned = check_against_oracle(whole, whole[0], [5, 6, 7], [9, 2, 4], Interval(3, 8))
    page = whole[0].geometry.planes[0].page_stride
    assert {int(at) // page for at in planned[0].dest_offset} == {9, 2}


@pytest.mark.parametrize("dest_tp", [1, 2, 8])
def test_one_replica_sends_and_senders_are_spread(dest_tp: int) -> None:
    # Eight source ranks share two heads, four replicas each.
    sources = ranks(*[make(heads=(i // 4, i // 4 + 1)) for i in range(8)])
    got = []
    for rank in range(dest_tp):
        heads = (0, 2) if dest_tp == 1 else (rank * 2 // dest_tp, rank * 2 // dest_tp + 1)
        got.append(senders(sources, RankGeometry(rank=rank, geometry=make(heads=heads))))
    assert (
        got
        == {
            1: [(0, 4)],
            2: [(0,), (5,)],
            8: [(i,) for i in range(8)],
        }[dest_tp]
    )


def test_latents_come_from_one_rank_each() -> None:
    sources = ranks(*[make(heads=(0, 1), kind="mla") for _ in range(4)])
    for rank in range(6):
        dest = RankGeometry(rank=rank, geometry=make(heads=(0, 1), kind="mla"))
        assert senders(sources, dest) == (rank % 4,)


def test_data_parallel_ranks_take_turns() -> None:
    """Their ranks 0 are served by different senders; `turn` is sent with the geometry."""
    sources = ranks(*[make(heads=(0, 1), kind="mla") for _ in range(4)])
    dests = [RankGeometry(rank=0, geometry=make(heads=(0, 1), kind="mla"), turn=turn) for turn in range(6)]
    told = [msgspec.msgpack.decode(msgspec.msgpack.encode(dest), type=RankGeometry) for dest in dests]
    assert [senders(sources, dest) for dest in told] == [(0,), (1,), (2,), (3,), (0,), (1,)]


@pytest.mark.parametrize(("p_size", "d_size"), [(1, 1), (1, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_latents_move_once_to_each_rank_however_many_heads_ranks_share(p_size: int, d_size: int, split: bool) -> None:
    """A rank's latents cover all heads, whichever heads it owns."""

    def share(rank: int) -> RankGeometry:
        planes = (split_latent_planes if split else latent_planes)(5, 2, "bfloat16")
        spec = GroupSpec(name="g", owner="target", kind="mla", planes=planes, page_size=4, layer_ids=(0, 1, 2))
        return RankGeometry(rank=rank, geometry=Geometry.block_major(spec, 8, first_head=rank))

    sources = [share(rank) for rank in range(p_size)]
    for rank in range(d_size):
        dest = share(rank)
        assert senders(sources, dest) == (rank % p_size,)
        planned = plan_copies(sources, dest, [1, 2, 3], [5, 6, 7], Interval(2, 11))
        assert {source: copies.total for source, copies in planned.items() if len(copies)} == {
            rank % p_size: 9 * 3 * 7 * 2
        }


def test_pipeline_stages_by_layer_id() -> None:
    sources = ranks(make((0, 1)), make((2, 3, 4)))
    dest = RankGeometry(rank=3, geometry=make((1, 2)))
    planned = check_against_oracle(sources, dest, [3, 4], [7, 1], Interval(1, 7))
    assert set(planned) == {0, 1}
    assert senders(sources, RankGeometry(rank=0, geometry=make((2, 4)))) == (1,)


def test_layers_in_another_order() -> None:
    sources = ranks(make((5, 3, 4)))
    check_against_oracle(sources, RankGeometry(rank=0, geometry=make((3, 4, 5))), [3], [7], Interval(1, 3))


def tiled(**options: Any) -> Geometry:
    geometry = make(page_size=8, order=BLOCK_MAJOR_HND, **options)
    return with_planes(geometry, tile=4).check()


def test_tiles_are_copied_whole() -> None:
    whole = ranks(tiled())
    planned = plan_copies(whole, whole[0], [3, 5], [2, 9], Interval(5, 9))
    plain = make(page_size=8, order=BLOCK_MAJOR_HND)
    want = addresses(plain, [2, 9], range(4, 12))
    got = set()
    for d, n in zip(planned[0].dest_offset, planned[0].nbytes, strict=True):
        got |= set(range(int(d), int(d + n)))
    assert got == set(want.values())


def test_a_state_slot_moves_whole() -> None:
    def state(pages: int) -> Geometry:
        return make(heads=(0, 1), kind="state", page_size=1, head_dim=40, pages=pages)

    planned = plan_copies(ranks(state(5)), ranks(state(9))[0], [4], [7], Interval(0, 1))
    stride = state(5).planes[0].page_stride
    assert planned[0].source_offset.tolist() == [4 * stride]
    assert planned[0].dest_offset.tolist() == [7 * stride]
    assert planned[0].nbytes.tolist() == [stride]


def test_regions_are_named() -> None:
    planned = plan_copies(ranks(make(region=3)), ranks(make(region=5))[0], [1], [1], Interval(0, 2))
    assert (planned[0].source_region, planned[0].dest_region) == (3, 5)


def test_nothing_wanted_plans_nothing() -> None:
    whole = ranks(make())
    assert plan_copies(whole, whole[0], [], [], Interval(7, 7)) == {}


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        ([1, 2], [1, 0], "null page in the destination"),
        ([0, 2], [1, 2], "null page in the source"),
        ([1, -1], [1, 2], "page -1 in the source"),
        ([1, 2], [1, 12], "destination page 12 of 12"),
        ([1, 12], [1, 2], "source page 12 of 12"),
        ([1, 2], [1], "destination block table ends"),
        ([], [1, 2], "source block table ends"),
        ([1, 2], [3, 3], "named twice"),
        ([1.5, 2], [1, 2], "list of page ids"),
        ([[1], [2]], [1, 2], "list of page ids"),
    ],
)
def test_bad_page_ids_are_refused(here: Any, there: Any, message: str) -> None:
    whole = ranks(make())
    with pytest.raises(ProtocolError, match=message):
        plan_copies(whole, whole[0], here, there, Interval(2, 6))


def test_pages_outside_the_interval_may_be_null() -> None:
    whole = ranks(make())
    check_against_oracle(whole, whole[0], [0, 0, 4, 0], [0, 0, 4], Interval(8, 11))


def test_incompatible_layouts_are_named() -> None:
    with pytest.raises(IncompatiblePeerError, match="head_dim: here 2, peer 4") as caught:
        senders(ranks(make()), RankGeometry(rank=0, geometry=make(head_dim=4)))
    assert set(caught.value.fields) == {"k.head_dim", "v.head_dim"}
    with pytest.raises(IncompatiblePeerError, match="tile"):
        senders(ranks(tiled()), RankGeometry(rank=0, geometry=make(page_size=8)))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no source rank"),
        (ranks(make((0,))), "nobody holds layer 1 head 0"),
        (ranks(make(heads=(0, 1))), "nobody holds layer 0 head 1"),
        (ranks(make(), make(page_size=2)), "one block table"),
        (ranks(make()) * 2, "must differ"),
    ],
)
def test_bad_topologies_are_refused(sources: list[RankGeometry], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        senders(sources, RankGeometry(rank=0, geometry=make()))


@dataclass(slots=True)
class Part:
    """A plane with all heads of the model, their cut, and a head's shape."""

    name: str
    dtype: str
    cut: Cut
    num_heads: int
    head_dim: int


def ranks_of_planes(
    parts: list[Part], tp: int, pages: int, page_size: int, layers: tuple[int, ...], page_first: bool, step: int = 1
) -> list[RankGeometry]:
    """Each plane has its share of the heads on each rank. Planes lie one after the other, or backwards (`step` -1): in
    a page, or in a layer.
    """
    out = []
    for rank in range(tp):
        planes, at = [], 4
        share = [part.num_heads if part.cut == "whole" else part.num_heads // tp for part in parts]
        row = [n * part.head_dim * ITEMSIZE[part.dtype] for n, part in zip(share, parts, strict=True)]
        for part, heads, width in [*zip(parts, share, row, strict=True)][::step]:
            size = ITEMSIZE[part.dtype]
            page = sum(row) * page_size if page_first else width * page_size
            planes.append(
                Plane(
                    name=part.name,
                    dtype=part.dtype,
                    cut=part.cut,
                    num_heads=heads,
                    head_dim=part.head_dim,
                    layer_stride=page * pages if page_first else sum(row) * page_size * pages,
                    page_stride=page,
                    token_stride=width,
                    head_stride=part.head_dim * size,
                    element_stride=size,
                    first_head=0 if part.cut == "whole" else rank * heads,
                    base=at,
                )
            )
            at += width * page_size * (1 if page_first else pages)
        geometry = Geometry(
            group="g",
            region=0,
            region_bytes=4 + sum(row) * page_size * pages * len(layers),
            num_pages=pages,
            page_size=page_size,
            layer_ids=layers,
            planes=tuple(planes[::step]),
        ).check()
        out.append(RankGeometry(rank=rank, geometry=geometry))
    return out


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_planes_of_any_shapes_each_wanted_byte_exactly_once(data: st.DataObject) -> None:
    parts = [
        Part(
            name=f"plane{index}",
            dtype=data.draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
            cut=data.draw(st.sampled_from(["heads", "channels", "whole"])),
            num_heads=data.draw(st.sampled_from([4, 8])),
            head_dim=data.draw(st.integers(1, 3)),
        )
        for index in range(data.draw(st.integers(1, 3)))
    ]
    layers = tuple(data.draw(st.permutations(range(data.draw(st.integers(1, 3))))))
    sides = [
        ranks_of_planes(
            parts,
            data.draw(st.sampled_from([1, 2, 4])),
            12,
            data.draw(st.integers(1, 4)),
            layers,
            data.draw(st.booleans()),
            data.draw(st.sampled_from([1, -1])),
        )
        for _ in range(2)
    ]
    start = data.draw(st.integers(0, 5))
    tokens = Interval(start, start + data.draw(st.integers(1, 5)))
    here, there = (
        data.draw(st.permutations(range(1, 12)))[: -(-tokens.stop // side[0].geometry.page_size)] for side in sides
    )
    first = data.draw(st.integers(0, 3))
    for layer_range in (ALL_LAYERS, Interval(first, first + 1)):
        for dest in sides[1]:
            check_against_oracle(sides[0], dest, here, there, tokens, layer_range)


def test_a_latent_and_its_rope_key_come_from_one_rank_and_heads_from_all() -> None:
    parts = [Part("latent", "bfloat16", "whole", 4, 2), Part("k", "bfloat16", "heads", 4, 2)]
    sources = ranks_of_planes(parts, 4, 6, 2, (0, 1), page_first=True)
    dest = ranks_of_planes(parts, 1, 6, 2, (0, 1), page_first=True)[0]
    planned = check_against_oracle(sources, dest, [3, 1], [2, 5], Interval(0, 4))
    assert tuple(planned) == (0, 1, 2, 3)
    assert [copies.total for copies in planned.values()] == [160, 32, 32, 32]


def test_a_layer_range_moves_those_layers_alone() -> None:
    whole = ranks(make((5, 3, 4)))
    for layers in (Interval(3, 5), Interval(5, 6), Interval(4, 5)):
        check_against_oracle(whole, RankGeometry(rank=0, geometry=make((3, 4, 5))), [3], [7], Interval(1, 3), layers)
    assert plan_copies(whole, whole[0], [3], [7], Interval(1, 3), Interval(6, 9)) == {}


def test_a_hostile_interval_sizes_nothing() -> None:
    whole = ranks(make())
    with pytest.raises(ProtocolError, match="source block table ends"):
        plan_copies(whole, whole[0], [1], [1], Interval(0, 1 << 60))


def test_one_long_plan_of_ragged_pages() -> None:
    sources, dests = ranks(make(page_size=16, pages=400)), ranks(make(page_size=7, pages=900))
    here, there = np.random.default_rng(1).permutation(399) + 1, np.random.default_rng(2).permutation(899) + 1
    check_against_oracle(sources, dests[0], here.tolist(), there.tolist(), Interval(5, 3000))
