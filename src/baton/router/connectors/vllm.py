"""Base class of the connectors of vLLM servers."""

from __future__ import annotations

from abc import abstractmethod

import aiohttp

from baton.errors import ProtocolError, RequestError
from baton.openai.answers import Model
from baton.router.clients.vllm_api import can_resume
from baton.router.clients.vllm_client import VllmClient
from baton.router.connectors.base import Connector
from baton.router.pooled_engine import PooledEngine
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import EngineIdentity, EngineInfo, GenerateRequest, Role

# vLLM's default; a server may have another.
_BLOCK_TOKENS = 16


class VllmConnector(Connector):
    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> VllmClient:
        async def identify(client: VllmClient, model: Model) -> EngineInfo:
            if model.root is None or model.max_model_len is None:
                raise ProtocolError(f"{url} is not a vLLM server: it names no checkpoint and length of {model.id}")
            identity = await self._identify(client, role)
            adapters = await self._adapters(client)
            return EngineInfo(
                **{name: getattr(identity, name) for name in EngineIdentity.__struct_fields__},
                role=role,
                model=model.id,
                model_path=model.root,
                max_model_len=model.max_model_len,
                # Whether vLLM reuses handed-over prompts as prefixes is unknown.
                prefix_step=_BLOCK_TOKENS if role == "prefill" else 0,
                batch_invariant=False,
                adapters=adapters,
            )

        return VllmClient(session, url, timers, identify)

    def check(self, params: SamplingParams) -> None:
        super().check(params)
        if params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not supported by this router: send the request to a vLLM server", "prompt_logprobs"
            )

    def can_resume(self, params: SamplingParams) -> bool:
        return can_resume(params)

    async def _adapters(self, client: VllmClient) -> dict[str, str]:
        """The server's LoRA adapters that can be handed off, by name. Raises the errors of `_identify`."""
        return {}

    @abstractmethod
    async def _identify(self, client: VllmClient, role: Role) -> EngineIdentity:
        """Raises the errors of `EngineClient.info`, and `RequestError` if the server lacks the role."""


def draws_anew(request: GenerateRequest, engine: PooledEngine) -> bool:
    """Whether another engine may sample another first token with the same seed: vLLM samples differently in a
    verification step.
    """
    drafts = engine.info is not None and engine.info.num_speculative_tokens > 0
    return drafts and request.sampling_params.temperature > 0
