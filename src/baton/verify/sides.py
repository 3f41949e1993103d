"""The two sides of a verification: an engine in this process, a deployment started for it, or servers that run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import BatonError
from baton.processes import Deployment
from baton.verify.acceptance import Acceptance
from baton.verify.client import Client
from baton.verify.counters import read_counters, read_settled
from baton.verify.observe import Case, Observed, num_drafts, observe_client, observe_llm, observe_url, served_model
from baton.wire import Recovery


@dataclass(frozen=True, slots=True)
class Answers:
    """What a side answered. `counters`: what its engines' counters say of these answers, or why they say nothing."""

    observed: list[Observed]
    counters: Acceptance | str


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs already. `metrics_urls` None: its own `/metrics`, if there is one; else they are required."""

    side: str
    url: str
    metrics_urls: tuple[str, ...] | None = None
    api_key: str | None = None
    timeout_s: float = 300.0
    concurrency: int = 1

    def client(self) -> Client:
        return Client(self.url, self.timeout_s, self.api_key)

    async def answers(self, cases: Sequence[Case], kv_mode: str | None = None, salted: bool = False) -> Answers:
        """Ask everything, with the counters read before and after. `salted`: keep vLLM's prefix cache out of it.

        Raises `EngineUnavailableError` or `ProtocolError` when the server lists no model, or required counters cannot
        be had.
        """
        async with self.client() as client:
            model = await client.model()
            # Other servers might refuse a field that they do not know.
            salt = f"verify-{secrets.token_hex(8)}" if salted and model.owned_by == "vllm" else None
            before = await self._counters(client, settled=False)
            observed = await observe_client(client, model.id, cases, self.concurrency, kv_mode, salt)
            after = before if isinstance(before, str) else await self._counters(client, settled=True)
        if not any(o.accepted for o in observed):
            # A router in front of other engines than Baton's does not know of rounds.
            observed = [replace(o, accepted=None) for o in observed]
        if isinstance(before, str) or isinstance(after, str):
            return Answers(observed, str(after))
        return Answers(observed, after.since(before))

    async def _counters(self, client: Client, settled: bool) -> Acceptance | str:
        urls = self.metrics_urls or (f"{self.url}/metrics",)
        try:
            return await (read_settled(client, urls) if settled else read_counters(client, urls))
        except BatonError as error:
            if self.metrics_urls is not None:
                raise
            return f"{self.side}: {error}"


def answers_in_process(settings: dict[str, Any], cases: Sequence[Case]) -> Answers:
    """Answers of one engine in this process. `settings` are those of `baton.LLM`, `model` included."""
    from baton.engine.llm import LLM

    k = num_drafts(settings)
    with LLM(**settings) as llm:
        observed = observe_llm(llm, cases, k)
        rounds, accepted = llm.metrics.num_drafts, llm.metrics.accepted_per_pos
    return Answers(observed, Acceptance(rounds, tuple(accepted)) if k else "the reference drafts nothing")


@dataclass(frozen=True, slots=True)
class Started:
    """A deployment of Baton's own that is started anew for each mode."""

    model: str
    prefill: int
    decode: int
    engine_flags: tuple[str, ...]
    kv_transport: str
    recovery: Recovery
    concurrency: int

    def answers(self, cases: Sequence[Case], mode: str) -> Answers:
        """Start it, ask everything, end it. A second mode in the same one would find the first one's pages."""
        with Deployment(
            self.model,
            prefill=self.prefill,
            decode=self.decode,
            engine_flags=self.engine_flags,
            kv_transport=self.kv_transport,
            router_flags=["--kv-mode", mode, "--recovery", self.recovery],
        ) as deployment:
            name = asyncio.run(served_model(deployment.url))
            observed = asyncio.run(observe_url(deployment.url, name, cases, self.concurrency))
        return Answers(observed, "the answers tell more than the counters")
