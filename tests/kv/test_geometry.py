"""Geometry: strides of dense layouts, and refusal of planes that leave their region or overlap."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.kv.geometry import (
    BLOCK_MAJOR_NHD,
    LAYER_MAJOR_NHD,
    Axis,
    CopyList,
    Geometry,
    Plane,
)
from baton.kv.spec import GroupSpec, PlaneSpec, kv_planes, latent_planes
from testkit.handoffs.planes import BLOCK_MAJOR_HND, LAYER_MAJOR_HND, split_latent_planes, with_planes


def make_spec(**changes: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "name": "target",
        "owner": "target",
        "kind": "full",
        "planes": kv_planes(2, 4, "bfloat16"),
        "page_size": 5,
        "window": None,
        "layer_ids": (0, 1, 2),
    }
    return GroupSpec(**{**values, **changes})


def test_block_major_is_the_pool_tensor() -> None:
    geometry = Geometry.block_major(make_spec(), 7)
    pool = np.zeros((7, 3, 2, 5, 2, 4), dtype=np.uint16)
    keys, values = geometry.planes
    strides = (
        keys.page_stride,
        keys.layer_stride,
        values.base - keys.base,
        keys.token_stride,
        keys.head_stride,
        keys.element_stride,
    )
    assert strides == pool.strides
    assert msgspec.structs.replace(values, name="k", base=keys.base) == keys
    assert geometry.region_bytes == pool.nbytes == 7 * make_spec().page_bytes
    assert (keys.first_head, keys.last_head, geometry.layer_ids) == (0, 2, (0, 1, 2))


@pytest.mark.parametrize("order", [BLOCK_MAJOR_NHD, BLOCK_MAJOR_HND, LAYER_MAJOR_NHD, LAYER_MAJOR_HND])
def test_every_order_addresses_every_element_once(order: tuple[Axis, ...]) -> None:
    geometry = Geometry.from_order(make_spec(), 3, order, base=8)
    offsets = []
    for plane in geometry.planes:
        counts = {
            "layer": (3, plane.layer_stride),
            "page": (3, plane.page_stride),
            "token": (5, plane.token_stride),
            "head": (2, plane.head_stride),
            "element": (4, plane.element_stride),
        }
        steps = [range(0, count * stride, stride) for count, stride in counts.values()]
        offsets += [plane.base + sum(combination) for combination in itertools.product(*steps)]
    assert sorted(offsets) == list(range(8, geometry.region_bytes, 2))


def test_one_latent_and_one_state_per_layer() -> None:
    latent = make_spec(kind="mla", planes=latent_planes(512, 64, "bfloat16"))
    assert [plane.name for plane in Geometry.block_major(latent, 2).planes] == ["latent"]
    assert latent.page_bytes == 3 * 5 * 576 * 2
    halves = make_spec(kind="mla", planes=split_latent_planes(512, 64, "bfloat16"))
    assert [plane.base for plane in Geometry.block_major(halves, 2).planes] == [0, 5 * 512 * 2]
    assert halves.page_bytes == latent.page_bytes


def test_planes_of_a_state_are_aligned_to_the_widest_element() -> None:
    parts = (
        PlaneSpec("conv", "bfloat16", 7, 3, "channels"),
        PlaneSpec("ssm", "float32", 2, 5),
        PlaneSpec("flags", "uint8", 1, 1, "whole"),
    )
    state = make_spec(kind="state", page_size=1, planes=parts)
    assert state.plane_offsets == (0, 44, 84, 88)
    geometry = Geometry.block_major(state, 4, first_head=2)
    assert [(plane.base, plane.first_head) for plane in geometry.planes] == [(0, 2), (44, 2), (84, 0)]
    assert geometry.planes[0].layer_stride == 88
    assert geometry.planes[0].page_stride == state.page_bytes == 3 * 88
    with pytest.raises(ProtocolError, match="several shapes"):
        Geometry.from_order(state, 4, BLOCK_MAJOR_NHD)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_ids": ()},
        {"planes": kv_planes(2, 0, "bfloat16")},
        {"planes": kv_planes(0, 4, "bfloat16")},
        {"planes": ()},
        {"planes": kv_planes(2, 4, "bfloat16")[:1] * 2},
        {"page_size": -1},
        {"planes": kv_planes(2, 4, "float12")},
        {"layer_ids": (0, 1, 1)},
        {"window": 4},
        {"kind": "sliding_window"},
        {"kind": "sliding_window", "window": 0},
        {"kind": "state"},
        {"owner": "draft"},
        {"module": 1},
        {"module": None},
    ],
)
def test_bad_specs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="group 'target'"):
        make_spec(**changes)


def changed(geometry: Geometry, **changes: Any) -> Geometry:
    """`geometry` with changed fields, which are its own or those of its planes."""
    of_planes = {name: value for name, value in changes.items() if name in Plane.__struct_fields__}
    return msgspec.structs.replace(
        with_planes(geometry, **of_planes), **{name: value for name, value in changes.items() if name not in of_planes}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 8}, "outside the region"),
        ({"base": 842}, "outside the region"),
        ({"region_bytes": 0}, "region_bytes"),
        ({"region_bytes": 1 << 62}, "region_bytes"),
        ({"page_stride": 2**80}, "outside the region"),
        ({"layer_stride": 0}, "overlap"),
        ({"layer_stride": -16}, "overlap"),
        ({"token_stride": 8}, "overlap"),
        ({"element_stride": 1}, "overlap"),
        ({"region": -1}, "negative"),
        ({"first_head": -1}, "negative"),
        ({"planes": ()}, "1 to 16 planes"),
        ({"planes": Geometry.block_major(make_spec(), 7).planes * 9}, "1 to 16 planes"),
        ({"name": "k"}, "names of planes"),
        ({"cut": "whole", "first_head": 1}, "begins with head 0"),
        ({"base": 0}, "overlap"),
        ({"num_heads": 1 << 40, "region_bytes": 1 << 60}, "a count is above"),
        ({"page_size": 1 << 40, "region_bytes": 1 << 60}, "a count is above"),
        ({"head_dim": 1 << 40, "element_stride": 4, "region_bytes": 1 << 60}, "a count is above"),
        ({"num_heads": 0}, "at least 1"),
        ({"tile": 0}, "at least 1"),
        ({"tile": 2}, "multiple of tile"),
        ({"tile": 5, "token_stride": 2}, "overlap"),
        ({"dtype": "object"}, "dtype"),
        ({"layer_ids": ()}, "at least 1"),
        ({"layer_ids": (0, 0, 1)}, "layer_ids"),
    ],
)
def test_check_refuses_what_is_not_memory(changes: dict[str, Any], message: str) -> None:
    geometry = Geometry.block_major(make_spec(), 7)
    with pytest.raises(ProtocolError, match=message):
        changed(geometry, **changes).check()


def test_strides_of_axes_with_one_entry_do_not_matter() -> None:
    geometry = Geometry.block_major(make_spec(layer_ids=(9,)), 7)
    with_planes(geometry, layer_stride=0).check()


@pytest.mark.parametrize("stride", [-1, (1 << 60) + 1, 1 << 63])
@pytest.mark.parametrize("axis", ["layer_stride", "token_stride"])
def test_no_stride_is_beyond_an_offset_even_of_an_axis_with_one_entry(axis: str, stride: int) -> None:
    """The planner multiplies offsets by it, as int64."""
    geometry = Geometry.block_major(make_spec(layer_ids=(9,), page_size=1), 7)
    with pytest.raises(ProtocolError, match="strides out of range"):
        with_planes(geometry, **{axis: stride}).check()


def test_geometry_crosses_the_wire() -> None:
    geometry = Geometry.block_major(make_spec(), 7, region=2, first_head=4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=Geometry) == geometry
    assert msgspec.json.decode(msgspec.json.encode(make_spec()), type=GroupSpec) == make_spec()


def test_copy_list_counts() -> None:
    offsets = np.array([0, 8], dtype=np.int64)
    copies = CopyList(0, 1, offsets, offsets, np.array([3, 4], dtype=np.int64))
    assert (len(copies), copies.total) == (2, 7)


def plane(name: str, base: int, **changes: Any) -> Plane:
    """Four heads of two 16-bit elements, in pages of 256 bytes that the planes share."""
    values: dict[str, Any] = {
        "name": name,
        "dtype": "bfloat16",
        "cut": "channels",
        "num_heads": 4,
        "head_dim": 2,
        "layer_stride": 1024,
        "page_stride": 256,
        "token_stride": 16,
        "head_stride": 4,
        "element_stride": 2,
        "base": base,
    }
    return Plane(**{**values, **changes})


def of(*planes: Plane, page_size: int = 4) -> Geometry:
    return Geometry(
        group="target",
        region=0,
        region_bytes=4096,
        num_pages=4,
        page_size=page_size,
        layer_ids=(0, 1),
        planes=planes,
    )


def test_planes_of_other_shapes_share_a_page() -> None:
    of(plane("latent", 0, token_stride=20), plane("rope", 16, token_stride=20, num_heads=1, head_dim=2)).check()
    of(plane("conv", 0), plane("ssm", 64, dtype="float32", head_stride=8, element_stride=4, token_stride=48)).check()
    apart: dict[str, Any] = {"head_stride": 8, "token_stride": 32, "element_stride": 4}
    of(plane("x", 2, **apart), plane("y", 0, **apart)).check()


@pytest.mark.parametrize(
    "planes",
    [
        (plane("a", 0), plane("b", 60)),
        (plane("a", 0), plane("b", 200)),
        (plane("a", 0, token_stride=20), plane("b", 16, token_stride=20, num_heads=1, head_dim=3)),
        (plane("a", 0), plane("b", 64, page_stride=200)),
        (plane("a", 0), plane("b", 1, page_stride=256)),
    ],
)
def test_planes_that_share_bytes_are_refused(planes: tuple[Plane, ...]) -> None:
    with pytest.raises(ProtocolError, match="overlap"):
        of(*planes).check()


def test_planes_that_meet_across_steps_of_two_shared_axes_are_refused() -> None:
    """Pages are 6 bytes apart, layers 10: page 1 of plane b in layer 0 overlaps page 0 of plane a in layer 1."""
    shape: dict[str, Any] = {
        "dtype": "uint8",
        "num_heads": 1,
        "head_dim": 3,
        "layer_stride": 10,
        "page_stride": 6,
        "token_stride": 3,
        "head_stride": 3,
        "element_stride": 1,
    }
    planes = (plane("a", 0, **shape), plane("b", 3, **shape))
    geometry = msgspec.structs.replace(of(*planes, page_size=1), num_pages=2)
    for one in planes:
        msgspec.structs.replace(geometry, planes=(one,)).check()
    with pytest.raises(ProtocolError, match="overlap"):
        geometry.check()
