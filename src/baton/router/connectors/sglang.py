"""SGLang servers with the transfer backend `baton`: both legs begin at once, with the same prompt and ticket. Nothing
is sampled twice (docs/sglang.md).
"""

from __future__ import annotations

import secrets

import aiohttp

from baton.errors import EngineUnavailableError, RequestError
from baton.handoff.protocol.ticket import request_digest
from baton.router.clients.sglang_client import SglangClient
from baton.router.connectors.base import Connector, Legs
from baton.router.connectors.tickets import mint_ticket
from baton.router.leg_tasks import Chunks
from baton.router.pooled_engine import PooledEngine
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, Mode, Role

# Parameters that SGLang's `/generate` lacks, and their values without effect.
_NEUTRAL: dict[str, object] = {
    "allowed_token_ids": None,
    "bad_words": (),
    "structured_outputs": None,
    "prompt_logprobs": None,
}
_ROOM_BITS = 63


class SglangConnector(Connector):
    """The ticket travels as `bootstrap_host`, which the plug-in never uses as an address; the router draws the room."""

    needs_ticket_key = True
    computes_alone = False

    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> SglangClient:
        return SglangClient(session, url, timers, role)

    def legs(self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode) -> Legs:
        # A server can check a ticket only against the prompt.
        digest = request_digest(request.prompt_token_ids, SamplingParams())
        ticket = mint_ticket(self.config, prefill, decode, kv_mode, digest)
        room = secrets.randbits(_ROOM_BITS) or 1
        handoff = {"bootstrap_host": ticket, "bootstrap_room": room}
        p, d = SglangClient.of(prefill), SglangClient.of(decode)
        chunks = {"prefill": p.leg(request, handoff, first_only=True), "decode": d.leg(request, handoff)}
        return Legs(chunks)  # type: ignore[arg-type]

    def alone(self, request: GenerateRequest, engine: PooledEngine) -> Chunks:
        raise EngineUnavailableError(f"{engine.url}: an SGLang server computes only one leg of a request")

    def check(self, params: SamplingParams) -> None:
        super().check(params)
        for name, neutral in _NEUTRAL.items():
            if getattr(params, name) != neutral:
                raise RequestError(f"{name} is not supported over SGLang servers", name)

    def can_resume(self, params: SamplingParams) -> bool:
        """SGLang's penalties and seeds count from the end of the prompt that it was sent."""
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0
        return not any(penalties) and (params.temperature == 0.0 or params.seed is None)
