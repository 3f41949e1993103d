"""Handoffs by signed tickets: Baton's protocol, among engines of its own and among vLLM servers."""

from __future__ import annotations

import time

from baton.errors import EngineUnavailableError
from baton.handoff.ticket import TICKET_LIFE_S, Ticket, mint, new_transfer_id
from baton.openai.backend import KVMode
from baton.router.pool import Instance


def mint_ticket(key: bytes | None, prefill: Instance, decode: Instance, mode: KVMode, request_digest: bytes) -> str:
    """A ticket for one attempt of the request with this digest. Raises `EngineUnavailableError`."""
    p, d = prefill.info, decode.info
    if key is None:
        raise EngineUnavailableError("the router has no ticket key, and so cannot hand off")
    if p is None or d is None or p.control_address is None or d.control_address is None:
        raise EngineUnavailableError("an engine of the pair is not known any more")
    ticket = Ticket(
        transfer_id=new_transfer_id(),
        prefill_engine=p.engine_id,
        prefill_incarnation=p.incarnation,
        prefill_address=p.control_address,
        decode_engine=d.engine_id,
        decode_incarnation=d.incarnation,
        decode_address=d.control_address,
        mode=mode,
        expiry=int(time.time()) + TICKET_LIFE_S,
        request_digest=request_digest,
    )
    return mint(key, ticket)
