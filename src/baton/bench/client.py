"""Streamed answers with the times at which their tokens came, in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.openai.client import OpenAIClient


@dataclass(slots=True)
class Streamed:
    """One streamed answer. `ttft_s`: request sent to first token; `times_s`: arrival of each token, those of one event
    together.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to the first token; nan without tokens."""
        return self.times_s[0] if self.times_s else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first over the time from first to last."""
        span = self.times_s[-1] - self.times_s[0] if len(self.times_s) > 1 else 0.0
        return (len(self.token_ids) - 1) / span if span else float("nan")


async def stream_completion(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], into: Streamed | None = None
) -> Streamed:
    """The streamed answer to a completion request, in `into`, which has what came also where this raises. Raises as
    `OpenAIClient.stream` does.
    """
    result = Streamed() if into is None else into
    started = time.perf_counter()
    async for event in OpenAIClient(session, url).stream({**body, "return_token_ids": True}):
        for choice in event.choices:
            tokens = choice.token_ids or []
            result.times_s += [time.perf_counter() - started] * len(tokens)
            result.token_ids += tokens
            result.text += choice.text or ""
            if choice.logprobs is not None:
                result.logprobs += [value for value in choice.logprobs.token_logprobs if value is not None]
            result.finish_reason = choice.finish_reason or result.finish_reason
            if choice.spec_decode is not None:
                result.accepted = choice.spec_decode.accepted
    return result
