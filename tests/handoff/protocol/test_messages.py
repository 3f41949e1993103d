"""Every message survives the wire; malformed, oversized or unknown ones are rejected."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.plan.topology import MAX_GROUPS
from baton.handoff.protocol.fingerprint import compare_fingerprints, geometry_fields
from baton.handoff.protocol.frames import (
    DECODERS,
    MAX_FRAME,
    PROTOCOL_VERSION,
    Envelope,
    decode_frame,
    encode_frame,
    kind_of,
)
from baton.handoff.protocol.messages import (
    MAX_DRAFTER_STATES,
    MAX_DRAFTS,
    Ack,
    Admitted,
    Announce,
    AttemptKey,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    Confirm,
    ControlMessage,
    Finished,
    Hello,
    Nack,
    PieceDigest,
    Progress,
    ReadDone,
    Ready,
    Register,
    Renew,
    Repair,
    Seeds,
    check_table,
)
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.sampling_params import MAX_LOGPROBS
from baton.wire import TokenLogprobs
from testkit.handoffs.planes import with_planes

KEY = AttemptKey(b"0123456789abcdef", 2, "p-1", "d-1")
DIGESTS = {"target": [PieceDigest(Interval(3, 9), b"x" * 16)]}
SEEDS = Seeds(7, TokenLogprobs(-0.5, [(7, -0.5), (9, -1.25)]), [1, 2, 3])


def rank(page_size: int = 16, dtype: str = "bfloat16") -> RankGeometry:
    spec = GroupSpec(
        name="target",
        owner="target",
        kind="sliding_window",
        planes=kv_planes(2, 8, dtype),
        page_size=page_size,
        window=9,
        layer_ids=(0, 1),
    )
    return RankGeometry(rank=0, geometry=Geometry.block_major(spec, 8))


def one(geometry: RankGeometry) -> Instance:
    return Instance(rank=0, groups={"target": [geometry]})


MESSAGES: list[ControlMessage] = [
    Hello("P", "p-1", {"model": "m"}, one(rank()), bytes(16), b"proof", b"descriptor"),
    Bye("closing", True),
    Announce(KEY, ticket="t"),
    Admitted(KEY),
    Register(KEY, ticket="t", wanted={"target": Interval(3, 9)}, pages={"target": [4, 2]}),
    Ready(KEY, final={"target": 9}, pages={"target": [1]}),
    ReadDone(KEY),
    Confirm(KEY, SEEDS),
    Commit(KEY, final={"target": 9}, seeds=SEEDS, num_bytes=100, num_runs=2, round=1, digests=DIGESTS),
    Progress(KEY, DIGESTS),
    Repair(KEY, 1, {"target": [Interval(3, 9)]}),
    Renew(5.0, 17, echo=True, stalled=True),
    Finished(KEY, SEEDS),
    Ack(KEY),
    Nack(KEY, "no", "text"),
    Cancel(KEY, "no", "text"),
    Cancelled(KEY, "no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=kind_of)
def test_round_trip(message: ControlMessage) -> None:
    assert decode_frame(encode_frame(message, 3, 4)) == (3, 4, message)


def test_the_table_holds_exactly_the_messages() -> None:
    assert sorted(DECODERS) == sorted(kind_of(message) for message in MESSAGES)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(frame)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_frame_is_refused_or_is_another_valid_message(message: ControlMessage, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(message, 1, 1))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode_frame(bytes(frame[: data.draw(st.integers(at + 1, len(frame)))]))


def envelope(kind: str, body: bytes, version: int = PROTOCOL_VERSION, sequence: int = 1) -> bytes:
    return msgspec.msgpack.encode(Envelope(version, 1, sequence, kind, msgspec.Raw(body)))


def test_the_largest_seeds_fit_into_each_message_that_has_some() -> None:
    most = [((1 << 31) - 1 - token, -1e300) for token in range(MAX_LOGPROBS)]
    drafts = [(1 << 31) - 1] * MAX_DRAFTS
    seeds = Seeds((1 << 31) - 1, TokenLogprobs(-1e300, most), drafts, b"x" * MAX_DRAFTER_STATES)
    for message in (Commit(KEY, {}, seeds), Confirm(KEY, seeds), Finished(KEY, seeds)):
        assert decode_frame(encode_frame(message, 1, 1))[2] == message


def test_errors_of_a_frame_name_the_cause() -> None:
    body = msgspec.msgpack.encode(Ack(KEY))
    for frame, text in (
        (envelope("ACK", body, version=9), "version 9"),
        (envelope("EXEC", body), "unknown message kind 'EXEC'"),
        (envelope("CANCEL", body), "malformed CANCEL"),
        (envelope("ACK", body, sequence=0), "malformed frame"),
        (envelope("ACK", msgspec.msgpack.encode("x" * 9000)), "over its limit"),
        (bytes(MAX_FRAME + 1), "over the limit"),
        (b"\x91" * 5000, "malformed"),
    ):
        with pytest.raises(ProtocolError, match=text):
            decode_frame(frame)


def test_values_are_bounded() -> None:
    bad: list[ControlMessage] = [
        Ack(AttemptKey(b"short", 0, "p", "d")),
        Ack(AttemptKey(b"0" * 16, -1, "p", "d")),
        Register(KEY, ticket="t", wanted={"g": (-1, 2)}, pages={}),
        Register(KEY, ticket="t", wanted={"g": (3, 2)}, pages={}),
        Register(KEY, ticket="t", wanted={"g": (0, (1 << 24) + 1)}, pages={}),
        Register(KEY, ticket="t", wanted={f"g{i}": (0, 1) for i in range(MAX_GROUPS + 1)}, pages={}),
        Ready(KEY, final={}, pages={"g": [-1]}),
        Finished(KEY, Seeds(-1)),
        Finished(KEY, Seeds(1, None, [0] * 257)),
        Renew(0.0, 1),
        Renew(601.0, 1),
        Renew(float("nan"), 1),
        Renew(5.0, -1),
        Repair(KEY, 0, {}),
        Repair(KEY, 17, {}),
        Repair(KEY, 1, {"target": [(-1, 2)]}),
        Repair(KEY, 1, {"target": [(2, 1)]}),
        Repair(KEY, 1, {"target": [(i, i + 1) for i in range(257)]}),
        Repair(KEY, 1, {f"g{i}": [] for i in range(MAX_GROUPS + 1)}),
        Commit(KEY, final={}, seeds=SEEDS, round=17),
        Commit(KEY, final={}, seeds=SEEDS, seeds_digest=bytes(9)),
        Confirm(KEY, SEEDS, seeds_digest=bytes(9)),
        Progress(KEY, {"target": [PieceDigest(Interval(3, (1 << 24) + 1), b"x" * 8)]}),
        Progress(KEY, {"target": [PieceDigest(Interval(3, 4), b"")]}),
        Progress(KEY, {"target": [PieceDigest(Interval(3, 4), bytes(8 * 2049))]}),
        Ready(KEY, final={}, pages={}, digests={f"g{i}": [] for i in range(MAX_GROUPS + 1)}),
    ]
    for message in bad:
        with pytest.raises(ProtocolError, match="malformed"):
            decode_frame(encode_frame(message, 1, 1))
    with pytest.raises(ProtocolError, match="over its limit"):
        encode_frame(Cancel(KEY, "x", "y" * 9000), 1, 1)


def test_a_geometry_that_describes_no_memory_is_refused() -> None:
    geometry = msgspec.structs.replace(rank().geometry, region_bytes=10)
    hello = Hello("P", "p", {}, one(RankGeometry(rank=0, geometry=geometry)), bytes(16))
    _, _, message = decode_frame(encode_frame(hello, 1, 1))
    assert isinstance(message, Hello)
    with pytest.raises(ProtocolError, match="outside the region"):
        message.instance.check()


def test_groups_that_share_a_block_table_say_it_once() -> None:
    pages = list(range(1, 2000))
    one = Register(KEY, ticket="t", wanted={}, pages={"g0": pages})
    many = Register(KEY, ticket="t", wanted={}, pages={f"g{i}": pages for i in range(100)} | {"equal": list(pages)})
    frame = encode_frame(many, 1, 1)
    assert len(frame) < len(encode_frame(one, 1, 1)) + 100 * 10
    _, _, found = decode_frame(frame)
    assert found == many
    assert isinstance(found, Register)
    assert len({id(table) for table in found.pages.values()}) == 1, "a peer's table is in memory once, too"


@pytest.mark.parametrize("same", [{"b": "c"}, {"a": "a"}, {"b": "b"}, {"b": "d", "d": "a"}])
@pytest.mark.parametrize("kind", ["REGISTER", "READY"])
def test_a_block_table_that_nobody_has_is_refused(kind: str, same: dict[str, str]) -> None:
    tables: dict[str, Any] = {"pages": {"a": [1]}, "same": same}
    register, ready = Register(KEY, ticket="t", wanted={}, **tables), Ready(KEY, final={}, **tables)
    frame = envelope(kind, msgspec.msgpack.encode(register if kind == "REGISTER" else ready))
    with pytest.raises(ProtocolError, match="cannot have the block table of group"):
        decode_frame(frame)


def test_tables_are_checked() -> None:
    check_table("g", [1, 2, 3], Interval(0, 12), 4, 4)
    check_table("g", [0, 2, 3], Interval(4, 12), 4, 4)
    check_table("g", [], Interval(5, 5), 4, 4)


@pytest.mark.parametrize(
    ("pages", "start", "stop"),
    [
        ([1, 2], 0, 9),
        ([0, 2], 0, 8),
        ([1, 4], 0, 8),
        ([1, -1], 0, 8),
        ([2, 2], 0, 8),
    ],
)
def test_a_table_that_does_not_fit_is_refused(pages: Any, start: int, stop: int) -> None:
    with pytest.raises(ProtocolError, match="'g'"):
        check_table("g", pages, Interval(start, stop), 4, 4)


def test_fingerprints_name_each_difference() -> None:
    here = {"model": "a", **geometry_fields(one(rank(16)))}
    compare_fingerprints(here, {"model": "a", **geometry_fields(one(rank(7)))})
    with pytest.raises(ProtocolError) as error:
        compare_fingerprints(here, {"draft": "x", **geometry_fields(one(rank(16, "float32")))})
    text = str(error.value)
    assert "model: here 'a', peer 'absent'" in text
    assert "draft: here 'absent'" in text
    assert "group.target.k.dtype: here 'bfloat16', peer 'float32'" in text
    assert "layer_ids" not in text
    compare_fingerprints(here, dict(reversed(here.items())))
    with pytest.raises(ProtocolError, match="model: here 'a', peer 'b'"):
        compare_fingerprints(here, {**here, "model": "b"})


def sharded(tp: int, stages: int, heads: int = 4, **changes: Any) -> Instance:
    """Four layers in stages, four heads over the ranks of each."""
    found = []
    for stage in range(stages):
        for shard in range(tp):
            spec = GroupSpec(
                name="target",
                owner="target",
                kind="full",
                planes=kv_planes(heads // tp, 8, "bfloat16"),
                page_size=16,
                layer_ids=tuple(range(stage * 4 // stages, (stage + 1) * 4 // stages)),
            )
            geometry = Geometry.block_major(spec, 8, first_head=shard * heads // tp)
            found.append(RankGeometry(rank=stage * tp + shard, geometry=with_planes(geometry, **changes)))
    return Instance(rank=0, groups={"target": found})


def test_instances_are_compared_as_wholes() -> None:
    here = geometry_fields(sharded(1, 1))
    for tp, stages in ((2, 1), (1, 2), (4, 1), (2, 4)):
        compare_fingerprints(here, geometry_fields(sharded(tp, stages).check()))
    with pytest.raises(ProtocolError, match="heads: here '0-4', peer '0-8'"):
        compare_fingerprints(here, geometry_fields(sharded(2, 1, heads=8)))
    with pytest.raises(ProtocolError, match=r"target\.v\.cut: here 'heads', peer 'channels'"):
        compare_fingerprints(here, geometry_fields(sharded(2, 1, cut="channels")))


def test_ranks_that_contradict_each_other_are_no_instance() -> None:
    two, other = sharded(2, 1).groups["target"], sharded(2, 1, tile=16).groups["target"]
    with pytest.raises(ProtocolError, match="other planes"):
        geometry_fields(Instance(rank=0, groups={"target": [two[0], other[1]]}))
    with pytest.raises(ProtocolError, match="named twice"):
        Instance(rank=0, groups={"target": [two[0], two[0]]}).check()
    body = msgspec.msgpack.encode(Instance(rank=0, groups={"target": []}))
    for bad in (body, msgspec.msgpack.encode(Instance(rank=256, groups={})), msgspec.msgpack.encode({"rank": 0})):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(bad, type=Instance)


def test_a_rank_finds_its_own_geometry_in_the_instance() -> None:
    instance = msgspec.structs.replace(sharded(2, 2), rank=3)
    assert instance.own["target"].geometry.layer_ids == (2, 3)
    assert instance.own["target"].geometry.planes[0].first_head == 2
    assert msgspec.structs.replace(instance, rank=4).own == {}
