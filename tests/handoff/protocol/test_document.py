"""docs/protocol.md names every message, field, limit, timer and event as the code has it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from baton.errors import REASONS
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.events import FINAL_REASONS, HandoffEvent
from baton.handoff.protocol.frames import DECODERS, PROTOCOL_VERSION
from baton.handoff.protocol.messages import AttemptKey, PieceDigest, Seeds
from baton.handoff.protocol.ticket import Ticket, adapter_digest, prefix_digest, request_digest
from baton.handoff.session.config import Timers
from baton.kv.geometry import Geometry, Plane
from baton.kv.interval import Interval
from baton.sampling_params import SamplingParams
from baton.wire import TokenLogprobs
from tools.phase_tables import D_EVENTS, P_EVENTS

TEXT = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
FIELD = re.compile(r"(\[?)`([a-z_]+)`")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
PARTS = {
    "key (array)": AttemptKey,
    "interval (array)": Interval,
    "piece of `digests` (array)": PieceDigest,
    "seeds": Seeds,
    "logprobs": TokenLogprobs,
    "instance": Instance,
    "geometry of a rank": RankGeometry,
    "geometry": Geometry,
    "plane": Plane,
}
Fields = list[tuple[str, bool]]  # name, and whether it may be left out


def table(header: str) -> dict[str, list[str]]:
    """The other cells of each row, by its first."""
    lines = TEXT[TEXT.index(f"| {header} |") :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {first: rest for first, *rest in rows}


def sha256(content: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def named_in(cell: str) -> Fields:
    return [(name, bool(bracket)) for bracket, name in FIELD.findall(cell)]


def fields_of(struct: type[msgspec.Struct]) -> Fields:
    return [(field.name, not field.required) for field in msgspec.structs.fields(struct) if field.name != "key"]


MESSAGES, TIMERS = table("kind | from"), table("timer | default")


def test_every_message_is_in_the_table() -> None:
    assert MESSAGES.keys() == DECODERS.keys()


@pytest.mark.parametrize("kind", DECODERS)
def test_sender_limit_and_fields_of_a_message(kind: str) -> None:
    sender, limit, fields = MESSAGES[kind]
    decoder, max_bytes = DECODERS[kind]
    receivers = {"P": kind in P_EVENTS, "D": kind in D_EVENTS}
    assert sender == ("both" if len({*receivers.values()}) == 1 else "D" if receivers["P"] else "P")
    number, unit = limit.split()
    assert int(number.replace(",", "")) * UNITS[unit] == max_bytes
    assert sorted(named_in(fields)) == sorted(fields_of(decoder.type))


def test_hello_has_its_fields_in_order() -> None:
    """A proof covers them so."""
    assert named_in(MESSAGES["HELLO"][2]) == fields_of(DECODERS["HELLO"][0].type)


@pytest.mark.parametrize("part", PARTS)
def test_fields_of_a_part(part: str) -> None:
    (fields,) = table("part | fields")[part]
    assert named_in(fields)[: len(fields_of(PARTS[part]))] == fields_of(PARTS[part])
    assert PARTS[part].__struct_config__.array_like == part.endswith("(array)")


def test_every_part_is_tested() -> None:
    assert table("part | fields").keys() == PARTS.keys()


def test_fields_of_a_ticket() -> None:
    named = {name for name, _ in named_in(section("Tickets"))}
    both = {name.replace("prefill", "decode") for name in named if name.startswith("prefill_")}
    assert set(Ticket.__struct_fields__) <= named | both


def test_digests_of_what_a_ticket_is_for() -> None:
    params = SamplingParams(max_tokens=3, logit_bias={7: 1.0, 5: 2.0})
    fields = {**msgspec.to_builtins(params, str_keys=True), "logit_bias": {"5": 2.0, "7": 1.0}}
    digest = sha256([[1, 2, 3], 2, dict(sorted(fields.items()))])
    assert request_digest([1, 2, 3], params, 2) == digest
    assert adapter_digest(digest, "a@1") == hashlib.sha256(digest + b"a@1").digest()
    assert prefix_digest([1, 2], "salt") == sha256(["prefix", [1, 2], "salt"])


def test_timers_and_their_defaults() -> None:
    defaults = {f"`{field.name}`": field.default for field in dataclasses.fields(Timers)}
    assert {name: float(default) for name, (default, _) in TIMERS.items()} == defaults


def test_events_for_the_engine() -> None:
    named = {name.strip("`").partition("(")[0] for name in table("event | meaning")}
    assert named == {event.__name__ for event in get_args(HandoffEvent)}


def test_version_and_reasons() -> None:
    assert f"- `version` is {PROTOCOL_VERSION}." in TEXT
    reasons = section("Failure reasons")
    final = reasons.partition("`DecodeFailed.recoverable` is false for")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", final)) == FINAL_REASONS
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", reasons))
    assert named - {"handoff_timeout_s"} <= REASONS
