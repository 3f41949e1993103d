"""SGLang's buffers as geometries, and its metadata rows as seeds."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError, ProtocolError
from baton.handoff.agent.message_sizes import check_messages, message_bytes
from baton.handoff.plan.tables import copy_tables
from baton.handoff.plan.topology import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.digests import cut_into_pieces, tokens_to_digest
from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.messages import AttemptKey, PieceDigest, Ready, Seeds
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.kv.interval import Interval
from baton.kv.spec import Owner
from baton.plugin_base.regions import host_region
from baton.sglang.geometry import BufferLayout, KvBuffer, PagePart, RequestPages, describe_buffers, rules_of
from baton.sglang.seeds import MetadataRows
from baton.wire import Integrity, Mode

PAGES, PAGE, HEADS, DIM = 6, 4, 2, 8
TOKEN = HEADS * DIM * 4


def buffer(owner: Owner, part: str, layer: int, array: np.ndarray, page_size: int) -> KvBuffer:
    parts = (PagePart(part, "float32", "heads", HEADS, DIM),)
    place = (array.ctypes.data, array.nbytes, page_size * TOKEN)
    return KvBuffer(owner, part, layer, *place, parts, rules_of(owner, "full"))


def layout(arrays: list[np.ndarray], page_size: int = PAGE) -> BufferLayout:
    """K and V of a target's layer, and a drafter's K."""
    names: list[tuple[Owner, str]] = [("target", "k"), ("target", "v"), ("draft", "k")]
    buffers = [buffer(*name, 0, array, page_size) for name, array in zip(names, arrays, strict=True)]
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
    good = buffer("target", "k", 0, made[0], PAGE)
    with pytest.raises(ConfigError, match="no page of 8 tokens"):
        describe_buffers([good], 8, 0, host_region)
    with pytest.raises(ConfigError, match=r"two buffers are target\.k\.0"):
        describe_buffers([good, good], PAGE, 0, host_region)


def test_pages_of_windows_and_slots_of_states_come_last() -> None:
    """Field class E: what SGLang names last must not be left behind."""
    array = np.zeros((PAGES * PAGE, HEADS, DIM), dtype=np.float32)
    state = np.zeros((3, HEADS, DIM), dtype=np.float32)
    place = (array.ctypes.data, array.nbytes, PAGE * TOKEN)
    part = PagePart("k", "float32", "heads", HEADS, DIM)
    slot = (state.ctypes.data, state.nbytes, TOKEN)
    buffers = [
        KvBuffer("target", "k", 0, *place, (part,), rules_of("target", "full")),
        KvBuffer("target", "window_k", 0, *place, (part,), rules_of("target", "sliding_window", 6)),
        KvBuffer("target", "ssm", 0, *slot, (part,), rules_of("target", "state")),
    ]
    found = describe_buffers(buffers, PAGE, 0, host_region)
    assert found.final(18, 16) == {"target.k.0": 16}
    assert found.final(18, 18) == {"target.k.0": 18, "target.window_k.0": 18, "target.ssm.0": 1}
    # The query at 18 attends to 13 and later; a state moves whole after any hit.
    assert found.wanted(18, 18)["target.ssm.0"] == Interval(0, 1)
    wanted = found.wanted(18, 4)
    assert wanted == {
        "target.k.0": Interval(4, 18),
        "target.window_k.0": Interval(13, 18),
        "target.ssm.0": Interval(0, 1),
    }
    assert not found.below(wanted, 4)
    assert found.tables(18, RequestPages([1, 2, 3, 4, 5], [3, 1], [2])) == {
        "target.k.0": [1, 2, 3, 4, 5],
        "target.window_k.0": [0, 0, 0, 3, 1],
        "target.ssm.0": [2],
    }


def wide(num_layers: int, num_pages: int) -> BufferLayout:
    """A target of `num_layers` layers and a drafter's, in pages of one token of memory that nobody touches."""
    parts = [("target", part, layer) for layer in range(num_layers) for part in "kv"]
    parts += [("draft", part, 0) for part in "kv"]
    place = (0, num_pages * TOKEN, TOKEN)
    buffers = [
        KvBuffer(owner, name, layer, *place, (PagePart(name, "float32", "heads", HEADS, DIM),), rules_of(owner, "full"))
        for owner, name, layer in parts
    ]
    return describe_buffers(buffers, 1, 0, lambda address, nbytes: np.zeros(0, dtype=np.uint8))


def test_131072_tokens_in_scattered_pages_of_one_token_fit_into_a_message() -> None:
    """A table of 600 KB for each of 162 buffers would be 100 MB."""
    num_tokens, found = 131_072, wide(80, 400_000)
    check_messages(num_tokens, found.rules, found.geometries, found.shared, "full")
    ids = np.random.default_rng(0).permutation(np.arange(1, 400_000))[:num_tokens].tolist()
    tables = copy_tables(found.tables(num_tokens, RequestPages(ids)))
    key, wanted = AttemptKey(bytes(16), 0, "p", "d"), found.wanted(num_tokens, 0)
    final = found.final(num_tokens, num_tokens)
    for mode in get_args(Mode):
        d = DecodeHandoff(key, mode, "t", wanted, tables)
        (register,) = d.handle(ev.PeerReady())
        assert isinstance(register, ev.Send)
        p = PrefillHandoff(key, mode, "t", list(found.rules))
        p.handle(ev.Opened())
        p.handle(ev.Declared(num_tokens, tables, final))
        p.handle(ev.Received(register.message))
        offers = p.handle(ev.Sampled(Seeds(1), False, {}))
        sent = register.message if mode == "push" else offers[-1].message  # type: ignore[union-attr]
        frame = encode_frame(sent, 1, 1)
        assert len(frame) < 2**20
        assert decode_frame(frame)[2] == sent


def test_a_context_whose_messages_are_too_large_is_refused_at_the_start() -> None:
    found = wide(80, 2_000_000)
    with pytest.raises(ConfigError, match=r"page_size.*1800000 tokens need .*use larger pages"):
        check_messages(1_800_000, found.rules, found.geometries, found.shared, "off")
    # No longer prompt has room.
    check_messages(1 << 24, found.rules, wide(80, 100_000).geometries, found.shared, "off")
    with pytest.raises(ConfigError, match=r"digests \(integrity full\) of a prompt of 200000 tokens"):
        check_messages(200_000, found.rules, found.geometries, found.shared, "full")
    check_messages(200_000, found.rules, found.geometries, found.shared, "sampled")


@pytest.mark.parametrize("integrity", get_args(Integrity))
def test_the_size_of_a_message_is_not_underrated(integrity: Integrity) -> None:
    num_tokens, found = 3000, wide(3, 1 << 20)
    ids = list(range(2**17, 2**17 + num_tokens))
    tables, key = found.tables(num_tokens, RequestPages(ids)), AttemptKey(bytes(16), 0, "p", "d")
    digests = {
        name: [
            PieceDigest(piece, bytes(8))
            for part in tokens_to_digest(integrity, key, tokens)
            for piece in cut_into_pieces(part)
        ]
        for name, tokens in found.wanted(num_tokens, 0).items()
    }
    ready = Ready(key, found.final(num_tokens, num_tokens), tables, digests)
    size = len(encode_frame(ready, 1, 1))
    limit = message_bytes(num_tokens, found.rules, found.geometries, found.shared, integrity)
    assert size < limit < 1.5 * size + 2**17


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


def test_a_hello_has_room_for_a_model_of_80_layers_on_8_ranks() -> None:
    """Each buffer is a group; with 64 groups at most, models of more than 31 layers and a drafter could not connect."""
    array = np.zeros((PAGES * PAGE, HEADS, DIM), dtype=np.float32)
    buffers = [buffer("target", part, layer, array, PAGE) for layer in range(80) for part in "kv"]
    buffers += [buffer("draft", part, 0, array, PAGE) for part in "kv"]
    ranks = [describe_buffers(buffers, PAGE, rank, host_region).geometries for rank in range(8)]
    groups = {name: [geometries[name] for geometries in ranks] for name in ranks[0]}
    encoded = msgspec.msgpack.encode(Instance(rank=0, groups=groups, apart=True))
    assert msgspec.msgpack.decode(encoded, type=Instance).num_ranks == 8
    assert len(encoded) < 0.9 * 2**20  # of the frame's 1 MiB
