"""vLLM servers with `BatonConnector` (docs/vllm.md; docs/router.md has the order of the legs)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from baton.errors import HandoffError, ProtocolError, RequestError
from baton.handoff.protocol.ticket import adapter_digest, request_digest
from baton.router.clients.vllm_client import VllmClient
from baton.router.connectors.base import ConnectorConfig, HandoffOutcome, Legs, PrefixLeg, errors_only, in_turn
from baton.router.connectors.tickets import mint_ticket
from baton.router.connectors.vllm import VllmConnector, draws_anew
from baton.router.connectors.vllm_prefix import VllmPrefixMove, leg_params, prefix_request
from baton.router.leg_tasks import Chunks, LegSource
from baton.router.pooled_engine import PooledEngine
from baton.sampling_params import SamplingParams
from baton.wire import BATON_PARAM, GenerateRequest, LegParams, LegRole, Mode, Role, VllmIdentity


class VllmBatonConnector(VllmConnector):
    """Both legs have the same ticket."""

    needs_ticket_key = True
    can_seed = True
    moves_prefixes = True

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._identities: WeakKeyDictionary[VllmClient, VllmIdentity] = WeakKeyDictionary()

    def legs(self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode) -> Legs:
        p = VllmClient.of(prefill)
        tokens, seeded = request.prompt_token_ids, self.config.seed_first_token
        if seeded and request.sampling_params.max_tokens - request.num_known == 1:
            return Legs({"prefill": p.leg(request)})  # the first token is the last
        handed_over = len(tokens) if seeded else self._handed_over(p, len(tokens))
        if not handed_over and self._truncates(p):
            return Legs({"decode": VllmClient.of(decode).leg(request)})
        ticket = self._ticket(request, prefill, decode, kv_mode, handed_over)

        def on_end(outcome: HandoffOutcome) -> Coroutine[Any, Any, object] | None:
            # The decode server may never have seen its leg.
            cancels = outcome in ("failed", "aborted") or (seeded and outcome == "finished_early")
            return p.send_params(leg_params(LegParams(role="cancel", ticket=ticket))) if cancels else None

        chunks = (self._in_turn if seeded else self._at_once)(request, prefill, decode, ticket)
        return Legs(chunks, on_end=on_end)

    def _ticket(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode, handed_over: int
    ) -> str:
        """The digest covers the tokens that are handed over: a vLLM server can check a ticket only against these."""
        digest = request_digest(request.prompt_token_ids[:handed_over], SamplingParams())
        if request.adapter is not None:
            digest = adapter_digest(digest, request.adapter)
        return mint_ticket(self.config, prefill, decode, kv_mode, digest)

    def prefix_leg(
        self, request: GenerateRequest, source: PooledEngine, destination: PooledEngine, mode: Mode, expected: int
    ) -> PrefixLeg:
        """Raises `HandoffError` if a server does not take its leg."""
        p, d = VllmClient.of(source), VllmClient.of(destination)
        sends, receives = self._handing_back(p, "prefill"), self._handing_back(d, "decode")
        multiple, extra = receives.prefix_multiple, receives.prefix_extra
        if not self._moves_whole(p, d):
            sizes = f"blocks of {sends.prefix_multiple} and {multiple} tokens"
            raise HandoffError("other_blocks", f"{p.url} and {d.url} have windows in {sizes}")
        num_tokens = min(expected, len(request.prompt_token_ids) - 1 - extra) // multiple * multiple
        wire, longer = prefix_request(request, num_tokens + 1), prefix_request(request, num_tokens + extra + 1)
        ticket = self._ticket(wire, source, destination, mode, num_tokens)
        return VllmPrefixMove(p, d, wire, longer, ticket, num_tokens).leg

    def _moves_whole(self, source: VllmClient, destination: VllmClient) -> bool:
        """Whether each block of a window at the destination lies within one of the source."""
        sends, receives = (self._identities.get(client) for client in (source, destination))
        return sends is not None and receives is not None and sends.prefix_multiple % receives.prefix_multiple == 0

    def _handing_back(self, client: VllmClient, role: LegRole) -> VllmIdentity:
        """Raises `HandoffError` if a server does not take legs of hand-backs."""
        identity = self._identities.get(client)
        if identity is None or not identity.moves_prefixes:
            raise HandoffError("no_prefix_cache", f"{client.url} has none, or states")
        if role not in identity.roles:
            raise HandoffError("no_such_role", f"{client.url} takes no {role} legs: kv_both would")
        return identity

    def _in_turn(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, ticket: str
    ) -> dict[LegRole, LegSource]:
        p, d = VllmClient.of(prefill), VllmClient.of(decode)

        async def first(found: asyncio.Future[list[int] | None]) -> Chunks:
            offered = LegParams(role="prefill", ticket=ticket, seed_first_token=True)
            async for chunk in p.leg(request, leg_params(offered), first_only=True):
                yield chunk
                if chunk.token_ids and chunk.finish_reason is None:
                    found.set_result(chunk.token_ids)

        def then(sampled: list[int]) -> Chunks:
            tokens, known = request.prompt_token_ids, request.num_known
            more = msgspec.structs.replace(
                request, prompt_token_ids=tokens + sampled, num_prompt_tokens=len(tokens) - known
            )
            offered = LegParams(role="decode", ticket=ticket, whole_blocks=self._moves_whole(p, d))
            return d.leg(more, leg_params(offered), is_padded=self._computes_one(d))

        return in_turn(first, then)

    def _at_once(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, ticket: str
    ) -> dict[LegRole, LegSource]:
        p, d = VllmClient.of(prefill), VllmClient.of(decode)
        tokens, offered = request.prompt_token_ids, leg_params(LegParams(role="prefill", ticket=ticket))
        wanted = LegParams(role="decode", ticket=ticket, whole_blocks=self._moves_whole(p, d))
        decoding = d.leg(request, leg_params(wanted), is_padded=self._computes_one(d))
        if self._truncates(p):
            short = _shortened(request, self._handed_over(p, len(tokens)))
            return {"prefill": errors_only(p.leg(short, offered, first_only=True)), "decode": decoding}
        first = p.leg(request, offered, first_only=True)
        return {"prefill": errors_only(first) if draws_anew(request, prefill) else first, "decode": decoding}

    async def _adapters(self, client: VllmClient) -> dict[str, str]:
        digests = {name: (await self._ask_identity(client, name)).adapter for name in client.adapters}
        return {name: adapter for name, adapter in digests.items() if adapter}

    async def _ask_identity(self, client: VllmClient, adapter: str | None = None) -> VllmIdentity:
        answer = await client.send_params(leg_params(LegParams(role="identify")), adapter)
        try:
            return msgspec.convert((answer.kv_transfer_params or {}).get(BATON_PARAM), VllmIdentity)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"{client.url} does not run BatonConnector: {error}") from None

    async def _identify(self, client: VllmClient, role: Role) -> VllmIdentity:
        identity = await self._ask_identity(client)
        if role not in ("both", *identity.roles):
            raise RequestError(f"{client.url} has roles {identity.roles}, not {role!r}", "role")
        if identity.data_parallel_rank != client.rank:
            named = identity.data_parallel_rank is not None and client.rank is None
            problem = "has data-parallel ranks: name each, as URL#dp_rank=0" if named else "has no such rank"
            raise RequestError(f"{client.url} {problem}", "url")
        self._identities[client] = identity
        return identity

    def _computes_one(self, decode: VllmClient) -> bool:
        """Whether the decode server computes only the prompt's last token."""
        identity = self._identities.get(decode)
        return identity is not None and identity.prefill_multiple == 1

    def _truncates(self, prefill: VllmClient) -> bool:
        identity = self._identities.get(prefill)
        return identity is not None and identity.truncate_prefill

    def _handed_over(self, prefill: VllmClient, num_tokens: int) -> int:
        identity = self._identities.get(prefill)
        return num_tokens - 1 if identity is None else identity.handed_over(num_tokens)


def _shortened(request: GenerateRequest, handed_over: int) -> GenerateRequest:
    """A prefill leg of the handed-over tokens. It must sample the prompt's next token, since the drafter's last entry
    depends on it.
    """
    tokens, max_tokens = request.prompt_token_ids, request.sampling_params.max_tokens
    only = SamplingParams(max_tokens=max_tokens, temperature=0.0, allowed_token_ids=(tokens[handed_over],))
    num_prompt = min(len(tokens) - request.num_known, handed_over)
    return msgspec.structs.replace(
        request, prompt_token_ids=tokens[:handed_over], num_prompt_tokens=num_prompt, sampling_params=only
    )
