"""The sides of a verification: an engine in this process, a deployment that verify starts, or a running server."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from baton.deployment import Deployment
from baton.errors import BatonError, ConfigError
from baton.imports import without_gc
from baton.openai.client import OpenAIClient, base_url, connected_client
from baton.verify.acceptance_check import Acceptance
from baton.verify.counters import metrics_urls, read_counters, read_handed_back, read_settled
from baton.verify.observe import (
    REQUEST_TIMEOUT_S,
    Case,
    Observed,
    num_drafts,
    observe_client,
    observe_llm,
)
from baton.verify.prompts import ask_bos, read_prompts
from baton.wire import Recovery


@dataclass(frozen=True, slots=True)
class Answers:
    """`counters`: the acceptance, or why there is none. `num_handed_back`: prefixes handed back to prefill engines."""

    observed: list[Observed]
    counters: Acceptance | str
    num_handed_back: int = 0

    def __add__(self, other: Answers) -> Answers:
        counters = self.counters
        if not isinstance(counters, str):
            counters = other.counters if isinstance(other.counters, str) else counters + other.counters
        num_handed_back = self.num_handed_back + other.num_handed_back
        return Answers(self.observed + other.observed, counters, num_handed_back)


@dataclass(frozen=True, slots=True)
class ServerSide:
    """A running server, named `side` in messages. `metrics`: pages that must have counters; None: its own `/metrics`,
    if any."""

    side: str
    url: str
    metrics: tuple[str, ...] | None = None
    api_key: str | None = None
    timeout_s: float = REQUEST_TIMEOUT_S
    concurrency: int = 1

    @classmethod
    def parse(
        cls, side: str, url: str | None, metrics: str | None, api_key: str | None, timeout_s: float, concurrency: int
    ) -> ServerSide | None:
        """Read the options `--SIDE` and `--SIDE-metrics`. Raises `ConfigError`."""
        if url is None:
            if metrics is not None:
                raise ConfigError(f"{side}_metrics", f"is for a server that --{side} names")
            return None
        urls = None if metrics is None else metrics_urls(metrics, f"{side}_metrics")
        return cls(side, base_url(url, side), urls, api_key, timeout_s, concurrency)

    def answers(self, cases: Sequence[Case], kv_mode: str | None = None, salted: bool = False) -> Answers:
        """`salted`: do not let vLLM reuse prefixes.

        Raises `EngineUnavailableError`, `ProtocolError`.
        """
        return asyncio.run(self._answers(cases, kv_mode, salted))

    def read_prompts(self, path: str, add_special_tokens: bool) -> list[list[int]]:
        """Tokenised by the server. Raises `ConfigError`."""
        return asyncio.run(self._read_prompts(path, add_special_tokens))

    def bos(self) -> int | None:
        try:
            return asyncio.run(self._bos())
        except BatonError:
            return None

    def _client(self) -> AbstractAsyncContextManager[OpenAIClient]:
        return connected_client(self.url, self.timeout_s, self.api_key)

    async def _answers(self, cases: Sequence[Case], kv_mode: str | None, salted: bool) -> Answers:
        async with self._client() as client:
            model = await client.model()
            salt = f"verify-{secrets.token_hex(8)}"
            salts = [f"{salt}-{i}" for i in range(len(cases))] if salted and model.owned_by == "vllm" else None
            before = await self._counters(client)
            observed = await observe_client(client, model.id, cases, self.concurrency, kv_mode, salts)
            counters = await self._counters(client, before)
        if not any(o.accepted for o in observed):
            # A router over other engines does not count accepted drafts.
            observed = [replace(o, accepted=None) for o in observed]
        return Answers(observed, counters)

    async def _counters(self, client: OpenAIClient, before: Acceptance | str | None = None) -> Acceptance | str:
        """The counters, or their increase since `before`."""
        urls = self.metrics or (f"{self.url}/metrics",)
        if isinstance(before, str):
            return before
        try:
            if before is None:
                return await read_counters(client, urls)
            return (await read_settled(client, urls)).since(before)
        except BatonError as error:
            if self.metrics is not None:
                raise
            return f"{self.side}: {error}"

    async def _read_prompts(self, path: str, add_special_tokens: bool) -> list[list[int]]:
        async with self._client() as client:
            model = await client.model()

            async def encode(text: str, special: bool) -> list[int]:
                try:
                    return await client.tokenize(model.id, text, special)
                except BatonError as error:
                    raise ConfigError("prompts", f"{error}; give MODEL, whose tokenizer then serves") from None

            return await read_prompts(path, encode, add_special_tokens)

    async def _bos(self) -> int | None:
        async with self._client() as client:
            return await ask_bos(functools.partial(client.tokenize, (await client.model()).id))


@dataclass(frozen=True, slots=True)
class EngineSide:
    """One engine in this process. `settings`: those of `baton.LLM`, with `model`."""

    settings: Mapping[str, Any]

    def answers(self, cases: Sequence[Case]) -> Answers:
        with without_gc():
            from baton.engine.llm import LLM

        with LLM(**self.settings) as llm:
            observed = observe_llm(llm, cases, num_drafts(self.settings))
            counters: Acceptance | str = "the reference chooses how many tokens it drafts, by time"
            if num_drafts(self.settings) or not llm.metrics.num_drafts:
                counters = Acceptance(llm.metrics.num_drafts, tuple(llm.metrics.accepted_per_pos))
        return Answers(observed, counters)


@dataclass(frozen=True, slots=True)
class DeploymentSide:
    """A Baton deployment for all modes. `recovery` none exposes failed handoffs: recomputed, they would give the same
    answer. `hands_back`: prefill engines always get KV from the engines that hold it, however fast they compute."""

    model: str
    prefill: int
    decode: int
    flags: tuple[str, ...]
    role_flags: Mapping[str, Sequence[str]]
    kv_transport: str
    recovery: Recovery
    concurrency: int
    data_ranks: Mapping[str, int] = field(default_factory=dict)
    hands_back: bool = False

    def start(self) -> Deployment:
        """The caller closes it. Raises the errors of `Deployment`."""
        return Deployment(
            self.model,
            prefill=self.prefill,
            decode=self.decode,
            engine_flags=[*self.flags, "--recovery", self.recovery],
            role_flags=self.role_flags,
            kv_transport=self.kv_transport,
            router_flags=["--allow-mode-override", "--recovery", self.recovery, *self._hand_back_flags()],
            data_ranks=self.data_ranks,
        )

    def _hand_back_flags(self) -> list[str]:
        config = {"hand_back": True, "min_hand_back_length": 0}
        return ["--policy-config", json.dumps(config)] if self.hands_back else []

    def answers(self, running: Deployment, cases: Sequence[Case], mode: str) -> Answers:
        """Salted, so that no mode finds another's pages."""
        return asyncio.run(
            self._ask_candidate(running.url, [f"{url}/metrics" for url in running.decode_urls], cases, mode)
        )

    async def _ask_candidate(self, url: str, metrics: Sequence[str], cases: Sequence[Case], mode: str) -> Answers:
        async with connected_client(url, REQUEST_TIMEOUT_S) as client:
            before, moved = await read_settled(client, metrics), await read_handed_back(client)
            model, salts = (await client.model()).id, [mode] * len(cases)
            observed = await observe_client(client, model, cases, self.concurrency, mode, salts)
            after, moved = await read_settled(client, metrics), await read_handed_back(client) - moved
            return Answers(observed, after.since(before), moved)
