"""Tickets of one attempt, for Baton's own engines and for vLLM servers."""

from __future__ import annotations

import asyncio

from baton.errors import EngineUnavailableError
from baton.handoff.protocol.ticket import Ticket, sign_ticket
from baton.router.connectors.base import ConnectorConfig
from baton.router.pooled_engine import PooledEngine
from baton.wire import Mode


def mint_ticket(
    config: ConnectorConfig, prefill: PooledEngine, decode: PooledEngine, mode: Mode, request_digest: bytes
) -> str:
    """Sign a ticket for one attempt, valid for `config.ticket_life_s` seconds.

    Raises `EngineUnavailableError`.
    """
    p, d = prefill.info, decode.info
    if config.ticket_key is None:
        raise EngineUnavailableError("the router has no ticket key: start it with --ticket-key-file or --keys")
    if p is None or d is None:
        raise EngineUnavailableError(
            f"{prefill.url if p is None else decode.url} has not told its identity since it was lost"
        )
    # Engines' clocks are extrapolated from their last answers; travel time only shortens the ticket's life.
    now, life_s = asyncio.get_running_loop().time(), config.ticket_life_s
    expiries = (p.clock + now - prefill.answered + life_s, d.clock + now - decode.answered + life_s)
    ticket = Ticket.between(p, d, mode, request_digest, expiries, config.new_transfer_id())
    return sign_ticket(config.ticket_key, ticket)
