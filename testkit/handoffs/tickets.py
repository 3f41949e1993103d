"""Tickets made without a router. Unnamed fields have default values."""

from __future__ import annotations

from typing import Any

from baton.handoff.protocol.ticket import SignedTicket, Ticket, new_transfer_id, sign_ticket


def make_ticket(**changes: Any) -> Ticket:
    """A ticket from engine P to engine D, for a new transfer."""
    fields: dict[str, Any] = {
        "transfer_id": new_transfer_id(),
        "prefill_engine": "P",
        "prefill_incarnation": "P-1",
        "prefill_addresses": ["tcp://127.0.0.1:1"],
        "decode_engine": "D",
        "decode_incarnation": "D-1",
        "decode_addresses": ["tcp://127.0.0.1:2"],
        "mode": "push",
        "prefill_expiry": 60.0,
        "decode_expiry": 60.0,
        "request_digest": bytes(32),
    }
    return Ticket(**{**fields, **changes})


def make_ticket_between(p: Any, d: Any, expiry: float, **changes: Any) -> Ticket:
    """A ticket between two engines, with their names, incarnations and addresses."""
    fields: dict[str, Any] = {
        "prefill_engine": p.name,
        "prefill_incarnation": p.incarnation,
        "prefill_addresses": [p.address],
        "decode_engine": d.name,
        "decode_incarnation": d.incarnation,
        "decode_addresses": [d.address],
        "prefill_expiry": expiry,
        "decode_expiry": expiry,
    }
    return make_ticket(**{**fields, **changes})


def signed(ticket: Ticket, key: bytes) -> SignedTicket:
    return SignedTicket.of(ticket, sign_ticket(key, ticket))
