"""Engines of Baton's own: both legs are the same request, with one ticket."""

from __future__ import annotations

import aiohttp
import msgspec

from baton.handoff.ticket import request_digest
from baton.openai.backend import KVMode
from baton.router.client import EngineClient
from baton.router.connectors.base import Connector, Handoff
from baton.router.connectors.tickets import mint_ticket
from baton.router.join import Chunks, Leg
from baton.router.pool import Instance, Role
from baton.router.timers import RouterTimers
from baton.wire import GenerateRequest, HandoffParams


class EngineConnector(Connector):
    """A prefill leg's stream lasts as long as its pages are kept, so closing it is all that there is to end."""

    needs_ticket_key = True

    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> EngineClient:
        """See `Connector.client`."""
        return EngineClient(session, url, timers)

    def handoff(self, request: GenerateRequest, prefill: Instance, decode: Instance, kv_mode: KVMode) -> Handoff:
        """See `Connector.handoff`."""
        digest = request_digest(request.prompt_token_ids, request.sampling_params, request.num_prompt_tokens)
        ticket = mint_ticket(self.config.ticket_key, prefill, decode, kv_mode, digest, self.config.ticket_life_s)

        def leg(role: Leg, engine: Instance) -> Chunks:
            return engine.client.generate(
                msgspec.structs.replace(request, handoff=HandoffParams(role=role, ticket=ticket))
            )

        return Handoff({"prefill": leg("prefill", prefill), "decode": leg("decode", decode)})
