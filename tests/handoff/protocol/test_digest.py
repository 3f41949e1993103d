"""Digests are equal for equal bytes in any layout, and differ otherwise."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError, ProtocolError
from baton.handoff.agent.digesting import Digesting
from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol.digests import (
    SAMPLED_SHARE,
    MemoryDigester,
    cells_of,
    check_shape,
    cut_into_pieces,
    find_mismatches,
    groups_without_digests,
    seeds_digest,
    share,
    tokens_to_digest,
)
from baton.handoff.protocol.events import BadPiece, CheckDigests, DigestsChecked, MachineEvent
from baton.handoff.protocol.messages import MAX_HASHES, AttemptKey, PieceDigest, Seeds
from baton.kv.geometry import BLOCK_MAJOR_NHD, Axis, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from testkit.handoffs.planes import LAYER_MAJOR_HND, deep_rank, with_planes

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
LAYERS, HEADS, DIM, TOKENS = 3, 2, 4, 150
LAYER_IDS = (4, 5, 9)


class Pool:
    """One engine's memory of one group. All pools hold the same tokens, each in its own layout."""

    def __init__(self, page_size: int, order: tuple[Axis, ...] = BLOCK_MAJOR_NHD, group: str = "target") -> None:
        self.size = page_size
        spec = GroupSpec(
            name=group,
            owner="target",
            kind="full",
            planes=kv_planes(HEADS, DIM, "bfloat16"),
            page_size=page_size,
            layer_ids=LAYER_IDS,
        )
        count = -(-TOKENS // page_size)
        self.pages = [1 + (i * 7) % count for i in range(count)] if count % 7 else list(range(count, 0, -1))
        self.geometry = Geometry.from_order(spec, count + 1, order)
        self.region = np.random.default_rng(page_size).integers(0, 255, self.geometry.region_bytes, dtype=np.uint8)
        self.ranks = {group: RankGeometry(rank=0, geometry=self.geometry)}
        for t in range(TOKENS):
            for layer in range(LAYERS):
                for half in range(2):
                    for head in range(HEADS):
                        for e in range(DIM):
                            value = (t * 31 + layer * 7 + half * 5 + head * 3 + e) % 65521
                            self.at(t, layer, half, head, e)[:] = np.frombuffer(np.uint16(value).tobytes(), np.uint8)
        self.digester = MemoryDigester(self.ranks, [self.region])

    def at(self, t: int, layer: int, half: int, head: int, e: int) -> np.ndarray:
        g = self.geometry
        plane = g.planes[half]
        start = plane.base + layer * plane.layer_stride + self.pages[t // self.size] * plane.page_stride
        start += (t % self.size) * plane.token_stride + head * plane.head_stride + e * plane.element_stride
        return self.region[start : start + 2]

    def digests(self, start: int, stop: int, group: str = "target") -> list[PieceDigest]:
        return self.digester.digests(group, self.pages, Interval(start, stop))


def test_layout_and_page_size_do_not_matter() -> None:
    one, other = Pool(16), Pool(7, LAYER_MAJOR_HND)
    for start, stop in ((0, TOKENS), (3, 64), (63, 65), (149, 150)):
        found = one.digests(start, stop)
        assert found == other.digests(start, stop)
        assert [p.tokens for p in found] == list(cut_into_pieces(Interval(start, stop)))
        assert all(len(p.hashes) == 2 * 8 * LAYERS for p in found)
    assert one.digests(5, 5) == []


def test_a_rank_sends_every_cell_of_another_that_it_holds_alone() -> None:
    """Of each layer and plane; the order is that of the digests of a piece."""
    rank = Pool(16).ranks["target"]
    cells = share((rank,), rank, 0)
    assert sorted(cells) == sorted(cells_of(rank.geometry))
    assert len(cells) == len(LAYER_IDS) * 2


def test_more_digests_than_a_message_carries_are_refused() -> None:
    rank = deep_rank(MAX_HASHES // 2 + 1)
    with pytest.raises(ProtocolError, match="2050 digests for each piece are more than 2048"):
        share((rank,), rank, 0)


def test_one_flipped_bit_is_named() -> None:
    one, other = Pool(16), Pool(7, LAYER_MAJOR_HND)
    digests = {"target": one.digests(2, TOKENS)}
    assert find_mismatches(other.digester, other.ranks, digests, {"target": other.pages}) == []
    other.at(70, 1, 1, 0, 3)[1] ^= 4
    bad = find_mismatches(other.digester, other.ranks, digests, {"target": other.pages})
    assert bad == [BadPiece("target", Interval(64, 128), ((5, "v"),))]
    # A token that is in no interval may hold anything.
    other.at(1, 0, 0, 0, 0)[0] ^= 1
    assert find_mismatches(other.digester, other.ranks, digests, {"target": other.pages}) == bad


def test_equal_bytes_elsewhere_do_not_pass() -> None:
    one = Pool(16)
    one.region[:] = 0
    same = [one.digests(0, 16)[0], one.digests(16, 32)[0], one.digests(64, 80)[0]]
    same.append(Pool(16, group="draft").digests(0, 16, "draft")[0])
    every = {digest.hashes[i : i + 8] for digest in same for i in range(0, 2 * 8 * LAYERS, 8)}
    assert len(every) == 4 * 2 * LAYERS


def test_the_order_of_layers_in_memory_does_not_matter() -> None:
    one = Pool(16)
    ranks = dict(one.ranks)
    turned = msgspec.structs.replace(one.geometry, layer_ids=one.geometry.layer_ids[::-1])
    ranks["target"] = RankGeometry(rank=0, geometry=turned)
    found = MemoryDigester(ranks, [one.region]).digests("target", one.pages, Interval(0, 16))[0]
    # The first layer in memory has the higher id now; digests are salted by it, so its digest is the last.
    assert found.hashes != one.digests(0, 16)[0].hashes
    other = Pool(16, group="target")
    strides = {plane.name: plane.layer_stride for plane in one.geometry.planes}
    for layer in range(LAYERS):
        for plane in other.geometry.planes:
            at, to = plane.base + layer * strides[plane.name], plane.base + (LAYERS - 1 - layer) * strides[plane.name]
            rows = [page * plane.page_stride for page in one.pages]
            size = plane.token_bytes * one.size
            for row in rows:
                other.region[to + row : to + row + size] = one.region[at + row : at + row + size]
    found = MemoryDigester(ranks, [other.region]).digests("target", one.pages, Interval(0, 16))[0]
    assert found == one.digests(0, 16)[0]


def test_pages_that_do_not_exist_are_refused() -> None:
    one = Pool(16)
    for table in ([0], [len(one.pages) + 1], [-1], []):
        with pytest.raises(ProtocolError, match="target"):
            one.digester.digests("target", table, Interval(0, 16))
    with pytest.raises(ProtocolError, match="other"):
        one.digester.digests("other", one.pages, Interval(0, 16))
    tiled = GroupSpec(
        name="target",
        owner="target",
        kind="full",
        planes=kv_planes(1, 4, "bfloat16"),
        page_size=32,
        layer_ids=(0,),
    )
    geometry = Geometry.block_major(tiled, 4)
    tile = with_planes(geometry, tile=32)
    with pytest.raises(ConfigError, match="tiles"):
        MemoryDigester({"target": RankGeometry(rank=0, geometry=tile)}, [np.zeros(10000, np.uint8)])


def test_sampled_integrity_digests_one_block_in_so_many() -> None:
    assert tokens_to_digest("off", KEY, Interval(0, 1000)) == ()
    assert tokens_to_digest("full", KEY, Interval(3, 1000)) == (Interval(3, 1000),)
    assert tokens_to_digest("full", KEY, Interval(3, 3)) == ()
    counts = []
    for _ in range(50):
        key = AttemptKey(secrets.token_bytes(16), 0, "p", "d")
        chosen = tokens_to_digest("sampled", key, Interval(10, 64 * 80))
        # However a prefill is cut into chunks, the same blocks are chosen.
        chunks = [
            part for a, b in ((10, 700), (700, 64 * 80)) for part in tokens_to_digest("sampled", key, Interval(a, b))
        ]
        assert {part.start // 64 for part in chunks} == {part.start // 64 for part in chosen}
        counts.append(len(chosen))
    assert set(counts) == {80 // SAMPLED_SHARE}


def test_groups_without_due_digests_are_found() -> None:
    one = Pool(16)
    wanted = {"target": Interval(3, TOKENS)}
    whole = one.digests(3, 100) + one.digests(100, TOKENS)
    assert groups_without_digests({"target": whole}, wanted, "full", KEY) == []
    for missing in range(len(whole)):
        part = whole[:missing] + whole[missing + 1 :]
        assert groups_without_digests({"target": part}, wanted, "full", KEY) == ["target"]
    assert groups_without_digests({}, wanted, "full", KEY) == ["target"]
    assert groups_without_digests({}, wanted, "off", KEY) == []


@pytest.mark.parametrize(
    "bad", [(0, 10), (140, 151), (10, 10), (60, 70), (0, 65)], ids=["below", "above", "0", "2", "big"]
)
def test_pieces_of_a_wrong_shape_are_refused(bad: tuple[int, int]) -> None:
    wanted = {"target": Interval(3, TOKENS)}
    check_shape({"target": [PieceDigest(Interval(3, 64), b"x" * 8), PieceDigest(Interval(64, 128), b"x" * 8)]}, wanted)
    with pytest.raises(ProtocolError, match="target"):
        check_shape({"target": [PieceDigest(Interval(*bad), b"x" * 8)]}, wanted)
    with pytest.raises(ProtocolError, match="other"):
        check_shape({"other": [PieceDigest(Interval(3, 4), b"x" * 8)]}, wanted)
    with pytest.raises(ProtocolError, match="target"):
        check_shape(
            {"target": [PieceDigest(Interval(3, 64), b"x" * 8), PieceDigest(Interval(5, 64), b"x" * 8)]}, wanted
        )


def test_seeds_are_digested_per_attempt() -> None:
    seeds = Seeds(7, None, [8, 9])
    assert len(seeds_digest(KEY, seeds)) == 8
    others = [
        seeds_digest(KEY, Seeds(6, None, [8, 9])),
        seeds_digest(KEY, Seeds(7, None, [8, 1])),
        seeds_digest(AttemptKey(b"0" * 16, 1, "p", "d"), seeds),
    ]
    assert seeds_digest(KEY, seeds) not in others


class Inline:
    def start(self, job: Callable[[], None]) -> None:
        job()


def test_the_agent_is_woken_once_a_digest_is_there() -> None:
    """Otherwise the attempt would wait for the agent's next timer."""
    pool, found = Pool(16), list[list[tuple[str, MachineEvent]]]()
    digesting = Digesting[str](pool.digester, pool.ranks, Inline(), lambda: found.append(digesting.ended()))
    digesting.begin("attempt", CheckDigests(3, {}, {}), lambda group: ())
    assert found == [[("attempt", DigestsChecked(3, ()))]]
