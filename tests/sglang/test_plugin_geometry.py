"""SGLang's buffers as geometries, and its metadata rows as seeds."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engines.memory import host_region
from baton.errors import ConfigError, ProtocolError
from baton.handoff.protocol.messages import Seeds
from baton.kv.interval import Interval
from baton.sglang.geometry import BufferLayout, KvBuffer, describe_buffers
from baton.sglang.seeds import MetadataRows

PAGES, PAGE, HEADS, DIM = 6, 4, 2, 8
TOKEN = HEADS * DIM * 4


def layout(arrays: list[np.ndarray], page_size: int = PAGE) -> BufferLayout:
    """K and V of a target's layer, and a drafter's K."""
    names = [("target", "k", 0), ("target", "v", 0), ("draft", "k", 0)]
    buffers = [
        KvBuffer(owner, part, layer, array.ctypes.data, array.nbytes, page_size * TOKEN, "float32", HEADS, DIM)
        for (owner, part, layer), array in zip(names, arrays, strict=True)
    ]
    return describe_buffers(buffers, page_size, 0, host_region)


def arrays() -> list[np.ndarray]:
    return [np.zeros((PAGES * PAGE, HEADS, DIM), dtype=np.float32) for _ in range(3)]


def test_a_region_is_the_buffer_itself() -> None:
    made = arrays()
    found = layout(made)
    made[1][3, 1, 2] = 7
    region = found.regions[1]
    assert isinstance(region, np.ndarray)
    plane = found.geometries["target.v.0"].geometry.planes[0]
    at = 3 * plane.token_stride + plane.head_stride + 2 * plane.element_stride
    assert region[at : at + 4].view(np.float32)[0] == 7


def test_the_drafters_last_entry_is_final_with_the_first_token_only() -> None:
    found = layout(arrays())
    assert found.final(10, 8) == {"target.k.0": 8, "target.v.0": 8, "draft.k.0": 8}
    assert found.final(10, 10)["draft.k.0"] == 10
    # Its entry of the last prompt token depends on the first output token, so it moves even with a full prefix hit.
    assert found.wanted(10, 10) == {
        "target.k.0": Interval(10, 10),
        "target.v.0": Interval(10, 10),
        "draft.k.0": Interval(9, 10),
    }


def test_pages_of_another_size_than_the_buffers_are_refused() -> None:
    made = arrays()
    good = KvBuffer("target", "k", 0, made[0].ctypes.data, made[0].nbytes, PAGE * TOKEN, "float32", HEADS, DIM)
    with pytest.raises(ConfigError, match="no page of 8 tokens"):
        describe_buffers([good], 8, 0, host_region)
    with pytest.raises(ConfigError, match=r"two buffers are target\.k\.0"):
        describe_buffers([good, good], PAGE, 0, host_region)


def rows(tokens: np.ndarray, hidden: np.ndarray) -> MetadataRows:
    both = (tokens, hidden)
    return MetadataRows(
        [array.ctypes.data for array in both], [array[0].nbytes for array in both], [array.nbytes for array in both]
    )


def test_a_metadata_row_arrives_unchanged_in_another_row() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 99, (4, 16), dtype=np.int32), rng.random((4, 5), dtype=np.float32)
    target = np.zeros((8, 16), dtype=np.int32), np.zeros((8, 5), dtype=np.float32)
    seeds = rows(*source).read(2)
    assert seeds.first_token == source[0][2, 0]
    rows(*target).write(7, seeds)
    for have, want in zip(target, source, strict=True):
        assert (have[7] == want[2]).all()
        assert not have[:7].any()


def test_seeds_of_another_shape_or_token_change_nothing() -> None:
    target = np.zeros((2, 16), dtype=np.int32), np.zeros((2, 5), dtype=np.float32)
    seeds = rows(np.ones((2, 16), dtype=np.int32), np.ones((2, 6), dtype=np.float32)).read(0)
    good = rows(np.ones((2, 16), dtype=np.int32), np.ones((2, 5), dtype=np.float32)).read(0)
    other_token = Seeds(first_token=2, drafter_states=good.drafter_states)
    for bad, match in [
        (seeds, "another shape"),
        (Seeds(first_token=1), "no metadata row"),
        (other_token, "not that of the metadata row"),
    ]:
        with pytest.raises(ProtocolError, match=match):
            rows(*target).write(0, bad)
    with pytest.raises(ProtocolError, match="no metadata row 2"):
        rows(*target).write(2, good)
    assert not target[0].any()
    assert not target[1].any()
