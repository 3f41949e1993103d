"""The lifetime of a router's tickets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from baton.handoff.protocol.ticket import verify_ticket
from baton.router.connectors.base import ConnectorConfig
from baton.router.connectors.tickets import mint_ticket

KEY = b"k" * 32


def engine(name: str, clock: float) -> Any:
    info = SimpleNamespace(
        engine_id=name, incarnation=f"{name}-1", control_addresses=["tcp://127.0.0.1:1"], clock=clock
    )
    return SimpleNamespace(info=info, answered=asyncio.get_running_loop().time())


async def test_a_ticket_lives_as_long_as_the_router_is_told() -> None:
    p, d = engine("P", 1000.0), engine("D", 77.0)
    ticket = verify_ticket(
        KEY, mint_ticket(ConnectorConfig(KEY, ticket_life_s=30.0), p, d, "push", bytes(32)), "prefill", 1000.0
    )
    assert 30.0 <= ticket.prefill_expiry - 1000.0 < 60.0
    assert 30.0 <= ticket.decode_expiry - 77.0 < 60.0
