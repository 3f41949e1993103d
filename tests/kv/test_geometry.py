"""Geometry: strides of dense layouts, and refusal of what lies outside its region or overlaps."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.kv.geometry import (
    BLOCK_MAJOR_HND,
    BLOCK_MAJOR_NHD,
    LAYER_MAJOR_HND,
    LAYER_MAJOR_NHD,
    Axis,
    CopyList,
    Geometry,
    GroupSpec,
)


def make_spec(**changes: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "name": "target",
        "owner": "target",
        "kind": "full",
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 4,
        "page_size": 5,
        "dtype": "bfloat16",
        "window": None,
        "layer_ids": (0, 1, 2),
    }
    return GroupSpec(**{**values, **changes})


def test_block_major_is_the_pool_tensor() -> None:
    geometry = Geometry.block_major(make_spec(), 7)
    pool = np.zeros((7, 3, 2, 5, 2, 4), dtype=np.uint16)
    strides = (
        geometry.page_stride,
        geometry.layer_stride,
        geometry.half_stride,
        geometry.token_stride,
        geometry.head_stride,
        geometry.element_stride,
    )
    assert strides == pool.strides
    assert geometry.region_bytes == pool.nbytes == 7 * make_spec().page_bytes
    assert (geometry.first_head, geometry.last_head, geometry.layer_ids) == (0, 2, (0, 1, 2))


@pytest.mark.parametrize("order", [BLOCK_MAJOR_NHD, BLOCK_MAJOR_HND, LAYER_MAJOR_NHD, LAYER_MAJOR_HND])
def test_every_order_addresses_every_element_once(order: tuple[Axis, ...]) -> None:
    geometry = Geometry.from_order(make_spec(), 3, order, base=8)
    counts = {
        "layer": (3, geometry.layer_stride),
        "page": (3, geometry.page_stride),
        "half": (2, geometry.half_stride),
        "token": (5, geometry.token_stride),
        "head": (2, geometry.head_stride),
        "element": (4, geometry.element_stride),
    }
    steps = [range(0, count * stride, stride) for count, stride in counts.values()]
    offsets = sorted(8 + sum(combination) for combination in itertools.product(*steps))
    assert offsets == list(range(8, geometry.region_bytes, 2))


def test_one_latent_and_one_state_per_layer() -> None:
    latent = make_spec(kind="mla", num_kv_heads=1, head_dim=576)
    assert Geometry.block_major(latent, 2).num_halves == 1
    assert latent.page_bytes == 3 * 5 * 576 * 2
    state = make_spec(kind="state", page_size=1, num_kv_heads=1, head_dim=100, dtype="float32")
    assert Geometry.block_major(state, 2).page_stride == 3 * 100 * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 0, "layer_ids": ()},
        {"head_dim": 0},
        {"page_size": -1},
        {"dtype": "float12"},
        {"layer_ids": (0, 1)},
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 8}, "outside the region"),
        ({"base": 2}, "outside the region"),
        ({"region_bytes": 0}, "region_bytes"),
        ({"region_bytes": 1 << 62}, "region_bytes"),
        ({"page_stride": 2**80}, "outside the region"),
        ({"layer_stride": 0}, "overlap"),
        ({"layer_stride": -16}, "overlap"),
        ({"token_stride": 8}, "overlap"),
        ({"element_stride": 1}, "overlap"),
        ({"region": -1}, "negative"),
        ({"first_head": -1}, "negative"),
        ({"num_halves": 3}, "num_halves"),
        ({"num_heads": 1 << 40, "region_bytes": 1 << 60}, "a count is above"),
        ({"page_size": 1 << 40, "region_bytes": 1 << 60}, "a count is above"),
        ({"head_dim": 1 << 40, "element_stride": 4, "region_bytes": 1 << 60}, "a count is above"),
        ({"num_heads": 0}, "at least 1"),
        ({"tile": 0}, "at least 1"),
        ({"tile": 2}, "multiple of tile"),
        ({"tile": 5, "token_stride": 2}, "overlap"),
        ({"dtype": "object"}, "dtype"),
        ({"layer_ids": (0, 1)}, "layer_ids"),
        ({"layer_ids": (0, 0, 1)}, "layer_ids"),
    ],
)
def test_check_refuses_what_is_not_memory(changes: dict[str, Any], message: str) -> None:
    geometry = Geometry.block_major(make_spec(), 7)
    with pytest.raises(ProtocolError, match=message):
        msgspec.structs.replace(geometry, **changes).check()


def test_strides_of_axes_with_one_entry_do_not_matter() -> None:
    geometry = Geometry.block_major(make_spec(num_layers=1, layer_ids=(9,)), 7)
    msgspec.structs.replace(geometry, layer_stride=0).check()


def test_geometry_crosses_the_wire() -> None:
    geometry = Geometry.block_major(make_spec(), 7, region=2, first_head=4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=Geometry) == geometry
    assert msgspec.json.decode(msgspec.json.encode(make_spec()), type=GroupSpec) == make_spec()


def test_copy_list_counts() -> None:
    offsets = np.array([0, 8], dtype=np.int64)
    copies = CopyList(0, 1, offsets, offsets, np.array([3, 4], dtype=np.int64))
    assert (len(copies), copies.total) == (2, 7)
