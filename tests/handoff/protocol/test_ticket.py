"""Tickets: what is signed, what is refused, and the key file."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, EngineUnavailableError, ProtocolError
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import (
    Redeemer,
    SignedTicket,
    Ticket,
    load_or_create_key,
    new_transfer_id,
    request_digest,
    sign_ticket,
    verify_ticket,
)
from baton.sampling_params import SamplingParams
from baton.wire import EngineIdentity
from testkit.handoffs.tickets import make_ticket

KEY = b"k" * 32
TICKET = make_ticket(
    transfer_id=b"0123456789abcdef",
    attempt=1,
    prefill_incarnation="p-1",
    prefill_addresses=["tcp://127.0.0.1:1234"],
    decode_incarnation="d-1",
    decode_addresses=["tcp://127.0.0.1:1235"],
    prefill_expiry=1000.0,
    decode_expiry=5000.0,
)


def test_round_trip() -> None:
    text = sign_ticket(KEY, TICKET)
    assert text == sign_ticket(KEY, TICKET)
    assert text.isascii()
    assert "=" not in text
    assert verify_ticket(KEY, text, "prefill", now=900.0) == verify_ticket(KEY, text, "decode", now=4900.0)
    found = verify_ticket(KEY, text, "prefill", now=900.0)
    assert found == SignedTicket.of(TICKET, text)
    assert sign_ticket(KEY, found) == text
    assert TICKET.key == AttemptKey(b"0123456789abcdef", 1, "p-1", "d-1")
    assert str(TICKET.key) == b"0123456789abcdef".hex() + "/1"


def identity(name: str, address: str) -> EngineIdentity:
    return EngineIdentity(name.upper(), f"{name}-1", [address], "{}", 9, [2], 0)


def test_a_ticket_names_both_engines() -> None:
    p, d = identity("p", "tcp://127.0.0.1:1234"), identity("d", "tcp://127.0.0.1:1235")
    made, other = (Ticket.between(p, d, "push", bytes(32), (1000.0, 5000.0)) for _ in range(2))
    assert made.transfer_id != other.transfer_id
    assert msgspec.structs.replace(made, transfer_id=TICKET.transfer_id, attempt=1) == TICKET
    nobody = SimpleNamespace(engine_id="D", incarnation="d", control_addresses=[])
    with pytest.raises(EngineUnavailableError, match="no control address"):
        Ticket.between(p, nobody, "pull", bytes(32), (1.0, 1.0))


@pytest.mark.parametrize(
    ("text", "now", "what"),
    [
        (sign_ticket(b"x" * 32, TICKET), 900.0, "signature"),
        (sign_ticket(KEY, TICKET), 1000.0, "expired"),
        (sign_ticket(KEY, TICKET), 100.0, "more than"),
        (sign_ticket(KEY, msgspec.structs.replace(TICKET, prefill_expiry=float("inf"))), 900.0, "more than"),
        (sign_ticket(KEY, msgspec.structs.replace(TICKET, prefill_expiry=float("nan"))), 900.0, "more than|malformed"),
        ("", 900.0, "signature"),
        ("a" * 25000, 900.0, "too long"),
        ("***", 900.0, "base64url"),
        ("é", 900.0, "base64url"),
        (sign_ticket(KEY, msgspec.structs.replace(TICKET, transfer_id=b"short")), 900.0, "malformed"),
        (sign_ticket(KEY, msgspec.structs.replace(TICKET, prefill_addresses=["localhost"])), 900.0, "malformed"),
    ],
)
def test_refusals_are_named(text: str, now: float, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        verify_ticket(KEY, text, "prefill", now)


@given(st.integers(0, 10_000), st.sampled_from("ABab01-_"))
def test_no_changed_character_passes(position: int, character: str) -> None:
    text = sign_ticket(KEY, TICKET)
    position %= len(text)
    changed = text[:position] + character + text[position + 1 :]
    try:
        # The last character may carry unused bits, so that two texts can be one ticket.
        assert verify_ticket(KEY, changed, "prefill", 900.0) == SignedTicket.of(TICKET, changed)
        assert changed == text or position == len(text) - 1
    except ProtocolError:
        assert changed != text


def test_digest_covers_prompt_and_parameters() -> None:
    base = request_digest([1, 2], SamplingParams())
    assert base == request_digest((1, 2), SamplingParams())
    assert len(base) == 32
    assert base != request_digest([1, 3], SamplingParams())
    assert base != request_digest([1, 2], SamplingParams(seed=1))
    assert base == request_digest([1, 2], SamplingParams(), 2) != request_digest([1, 2], SamplingParams(), 1)
    assert request_digest([1], SamplingParams(logit_bias={1: 0.5, 2: 1.0})) == request_digest(
        [1], SamplingParams(logit_bias={2: 1.0, 1: 0.5})
    )
    assert len({new_transfer_id() for _ in range(100)}) == 100


def test_refused_tickets_are_counted() -> None:
    redeemer = Redeemer(KEY, TICKET.decode_engine, "d-1")
    redeemer.redeem(sign_ticket(KEY, TICKET), "decode", None, 4900.0)
    assert redeemer.refused == 0
    with pytest.raises(ProtocolError, match="used before"):
        redeemer.redeem(sign_ticket(KEY, TICKET), "decode", None, 4900.0)
    assert redeemer.refused == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_ticket_serves_the_request_that_it_was_signed_for(same: bool) -> None:
    redeemer = Redeemer(KEY, TICKET.decode_engine, "d-1")
    text, digest = sign_ticket(KEY, TICKET), TICKET.request_digest
    if same:
        assert redeemer.redeem(text, "decode", digest, 4900.0).key == TICKET.key
    else:
        with pytest.raises(ProtocolError, match="another request"):
            redeemer.redeem(text, "decode", b"x" * len(digest), 4900.0)


def test_a_ticket_key_file_is_made_once_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = load_or_create_key(path)
    assert len(key) == 32
    assert load_or_create_key(str(path)) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["key"]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        load_or_create_key(path)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"ticket_key_file: .*key: Not a directory"):
        load_or_create_key(path / "key")
    with pytest.raises(ConfigError, match=r"ticket_key_file: .*none/key: No such file or directory"):
        load_or_create_key(tmp_path / "none" / "key")
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="32 bytes"):
        load_or_create_key(path)
