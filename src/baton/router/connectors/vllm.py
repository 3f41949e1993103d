"""What the connectors of vLLM servers have in common."""

from __future__ import annotations

from abc import abstractmethod

import aiohttp

from baton.router.connectors.base import Connector
from baton.router.timers import RouterTimers
from baton.router.vllm_api import Model, can_resume
from baton.router.vllm_client import VllmClient
from baton.wire import EngineInfo, Role, SamplingParams


class VllmConnector(Connector):
    """A kind of handoff among vLLM servers, which are asked who they are once per life."""

    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> VllmClient:
        """See `Connector.client`."""

        async def identify(client: VllmClient, model: Model) -> EngineInfo:
            return await self._identify(client, model, role)

        return VllmClient(session, url, timers, identify)

    def can_resume(self, params: SamplingParams) -> bool:
        """See `Connector.can_resume`."""
        return can_resume(params)

    @abstractmethod
    async def _identify(self, client: VllmClient, model: Model, role: Role) -> EngineInfo:
        """Who a server is. Raises as `EngineClient.info` does, and `RequestError` for a role that it has not."""
