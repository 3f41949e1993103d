"""The connector of Baton's own engines: both legs carry the same request and ticket."""

from __future__ import annotations

import aiohttp
import msgspec

from baton.handoff.protocol.ticket import prefix_digest, request_digest
from baton.router.clients.engine_client import BatonClient
from baton.router.connectors.base import Connector, Legs, PrefixLeg
from baton.router.connectors.tickets import mint_ticket
from baton.router.leg_tasks import Chunks, LegSource
from baton.router.pooled_engine import PooledEngine
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, HandoffParams, LegRole, Mode, Role

# For the first token of a prefill engine on the same host. KV of longer prefills is copied during the prefill, and
# needs D's pages by then.
FIRST_TOKEN_WAIT_S = 0.02
# Sampling parameters of legs that compute nothing.
_NOTHING = SamplingParams(max_tokens=1, temperature=0.0)


class EngineConnector(Connector):
    """A prefill leg's stream lasts as long as its pages are held; closing it frees them. On one host D's work for a
    short prompt would delay the first token (docs/lifecycle.md).
    """

    needs_ticket_key = True
    moves_prefixes = True

    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> BatonClient:
        return BatonClient(session, url, timers)

    def legs(self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode) -> Legs:
        digest = request_digest(request.prompt_token_ids, request.sampling_params, request.num_prompt_tokens)
        ticket = self._ticket(request, prefill, decode, kv_mode, digest)

        def leg(role: LegRole, engine: PooledEngine) -> Chunks:
            return engine.client.generate(
                msgspec.structs.replace(request, handoff=HandoffParams(role=role, ticket=ticket))
            )

        legs: dict[LegRole, LegSource] = {"prefill": leg("prefill", prefill), "decode": leg("decode", decode)}
        one_host = prefill.client.host == decode.client.host
        return Legs(legs, first_token_wait_s=FIRST_TOKEN_WAIT_S if one_host else None)

    def _ticket(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, mode: Mode, digest: bytes
    ) -> str:
        return mint_ticket(self.config, prefill, decode, mode, digest)

    def alone(self, request: GenerateRequest, engine: PooledEngine) -> Chunks:
        """Add a ticket unless the engine's role is `both`: others only compute what a router has signed."""
        if engine.role != "both":
            digest = request_digest(request.prompt_token_ids, request.sampling_params, request.num_prompt_tokens)
            ticket = self._ticket(request, engine, engine, "push", digest)
            request = msgspec.structs.replace(request, handoff=HandoffParams(role="alone", ticket=ticket))
        return engine.client.generate(request)

    def prefix_leg(
        self, request: GenerateRequest, source: PooledEngine, destination: PooledEngine, mode: Mode, expected: int
    ) -> PrefixLeg:
        digest = prefix_digest(request.prompt_token_ids, request.cache_salt)
        ticket = self._ticket(request, source, destination, mode, digest)
        multiple = 1 if destination.info is None else destination.info.prefix_multiple
        wire = msgspec.structs.replace(
            request, request_id=f"{request.request_id}.prefix"[-256:], sampling_params=_NOTHING, num_prompt_tokens=None
        )

        def leg(role: LegRole, prefix_len: int, window_start: int, most_missing: int | None) -> Chunks:
            params = HandoffParams(
                role=role,
                ticket=ticket,
                prefix_len=prefix_len,
                window_start=window_start,
                prefix_multiple=multiple if role == "prefill" else 1,
            )
            engine = source if role == "prefill" else destination
            return engine.client.generate(
                msgspec.structs.replace(wire, handoff=params, max_prefill_tokens=most_missing)
            )

        return leg
