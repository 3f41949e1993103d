"""vLLM servers with vLLM's own NIXL connectors.

With `NixlConnector` the legs run in sequence: the decode server needs parameters from the prefill response. With
`NixlPushConnector` both legs begin at once and are paired by request id.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import msgspec

from baton.errors import EngineUnavailableError, ProtocolError, RequestError
from baton.router.clients.vllm_client import VllmClient
from baton.router.connectors.base import ConnectorConfig, HandoffOutcome, Legs, in_turn
from baton.router.connectors.vllm import VllmConnector, draws_anew
from baton.router.leg_tasks import Chunks, LegSource
from baton.router.pooled_engine import PooledEngine
from baton.sampling_params import NO_DEFAULTS
from baton.wire import EngineIdentity, GenerateRequest, LegRole, Mode, Role, TokenChunk

log = logging.getLogger(__name__)

_FETCHED: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
_METRICS, _PER_POSITION = "vllm:nixl_", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# vLLM's API does not give the vocabulary size.
_ANY_TOKEN = 2**31 - 1


class _Address(msgspec.Struct, frozen=True):
    """A connector's address, from a prefill response."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    transfer_mode: Literal["pull", "push"] = "pull"


class _NixlConnector(VllmConnector):
    has_modes = False
    mode: ClassVar[Literal["pull", "push"]]

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._addresses: WeakKeyDictionary[VllmClient, _Address] = WeakKeyDictionary()

    def legs(self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode) -> Legs:
        """Ignores `kv_mode`."""
        p = VllmClient.of(prefill)
        if request.sampling_params.max_tokens - request.num_known == 1:
            return Legs({"prefill": p.leg(request)})

        def on_end(outcome: HandoffOutcome) -> None:
            if outcome == "failed":
                self._addresses.pop(p, None)  # the server may have been replaced

        return Legs(self._chunks(request, prefill, decode), notices=False, on_end=on_end)

    def _chunks(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine
    ) -> dict[LegRole, LegSource]:
        async def first(found: asyncio.Future[dict[str, object] | None]) -> Chunks:
            chunk, params, is_first = await self._first(request, prefill)
            if is_first:
                yield chunk
            if not is_first or chunk.finish_reason is None:
                found.set_result(params)

        return in_turn(first, lambda params: VllmClient.of(decode).leg(request, params, is_padded=True))

    async def _first(
        self, request: GenerateRequest, prefill: PooledEngine
    ) -> tuple[TokenChunk, dict[str, object], bool]:
        """P's token, the parameters that D needs, and whether the token is the request's first: not if this server
        leaves out the prompt's last token, or if speculating servers sample other tokens.
        """
        p = VllmClient.of(prefill)
        chunk, params = await p.first_token(request, _FETCHED)
        if chunk.finish_reason in ("error", "abort"):
            raise EngineUnavailableError(f"engine {p.url}: {chunk.error or 'it gave the request up'}")
        try:
            address = self._addresses[p] = msgspec.convert(params, _Address)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"{p.url} does not hand over as vLLM's NIXL connectors do: {error}") from None
        if address.transfer_mode != self.mode:
            raise ProtocolError(f"{p.url} hands over by {address.transfer_mode}, not by {self.mode}")
        return (
            chunk,
            params,
            not draws_anew(request, prefill) and params.get("remote_num_tokens") == len(request.prompt_token_ids),
        )

    async def _identify(self, client: VllmClient, role: Role) -> EngineIdentity:
        if client.rank is not None:
            raise RequestError(f"{client.url}: vLLM's own connectors are known without data-parallel ranks", "url")
        metrics = await client.metrics()
        if role != "both" and not any(name.startswith(_METRICS) for name in metrics):
            raise ProtocolError(f"{client.url} does not run one of vLLM's NIXL connectors: it has no such metrics")
        self._addresses.pop(client, None)
        defaults = await client.sampling_defaults()
        if defaults is None:
            log.warning(
                "%s does not tell its sampling defaults, which vLLM does with --enable-scale-out: they are not used, "
                "and not compared with those of other servers",
                client.url,
            )
        # Unknown defaults equal no others.
        described = "unknown" if defaults is None else defaults.describe()
        return EngineIdentity(
            engine_id=client.url,
            incarnation=client.url,
            control_addresses=[client.url],
            fingerprint=json.dumps({"model.root": client.root, "output.sampling_defaults": described}),
            vocab_size=_ANY_TOKEN,
            eos_token_ids=[],
            num_speculative_tokens=len(metrics.get(_PER_POSITION, ())),
            sampling_defaults=defaults or NO_DEFAULTS,
        )


class NixlPullConnector(_NixlConnector):
    mode = "pull"


class NixlPushConnector(_NixlConnector):
    """The first handoff runs in sequence, since the response carries the prefill server's address."""

    mode = "push"

    def _chunks(
        self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine
    ) -> dict[LegRole, LegSource]:
        address = self._addresses.get(VllmClient.of(prefill))
        if address is None:
            return super()._chunks(request, prefill, decode)

        async def prefilling() -> Chunks:
            chunk, _, is_first = await self._first(request, prefill)
            if is_first:
                yield chunk

        wanted: dict[str, object] = {
            **msgspec.to_builtins(address),
            "do_remote_prefill": True,
            "do_remote_decode": False,
            # vLLM's request id without its random suffix.
            "remote_request_id": f"cmpl-{request.request_id}-0",
        }
        return {"prefill": prefilling(), "decode": VllmClient.of(decode).leg(request, wanted, is_padded=True)}
