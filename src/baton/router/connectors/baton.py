"""Engines of Baton's own: both legs are the same request, with one ticket."""

from __future__ import annotations

import aiohttp
import msgspec

from baton.handoff.protocol.ticket import request_digest
from baton.router.client import BatonClient
from baton.router.connectors.base import Connector, Legs
from baton.router.connectors.tickets import mint_ticket
from baton.router.join import Chunks
from baton.router.pool import PooledEngine
from baton.router.timers import RouterTimers
from baton.wire import GenerateRequest, HandoffParams, LegRole, Mode, Role


class EngineConnector(Connector):
    """A prefill leg's stream lasts as long as its pages are held, so closing the stream is enough to free them."""

    needs_ticket_key = True

    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> BatonClient:
        return BatonClient(session, url, timers)

    def legs(self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode) -> Legs:
        digest = request_digest(request.prompt_token_ids, request.sampling_params, request.num_prompt_tokens)
        ticket = mint_ticket(self.config.ticket_key, prefill, decode, kv_mode, digest, self.config.ticket_life_s)

        def leg(role: LegRole, engine: PooledEngine) -> Chunks:
            return engine.client.generate(
                msgspec.structs.replace(request, handoff=HandoffParams(role=role, ticket=ticket))
            )

        return Legs({"prefill": leg("prefill", prefill), "decode": leg("decode", decode)})

    def alone(self, request: GenerateRequest, engine: PooledEngine) -> Chunks:
        """An engine of a deployment computes what a router has signed, alone too."""
        if engine.role != "both":
            digest = request_digest(request.prompt_token_ids, request.sampling_params, request.num_prompt_tokens)
            ticket = mint_ticket(self.config.ticket_key, engine, engine, "push", digest, self.config.ticket_life_s)
            request = msgspec.structs.replace(request, handoff=HandoffParams(role="alone", ticket=ticket))
        return engine.client.generate(request)
