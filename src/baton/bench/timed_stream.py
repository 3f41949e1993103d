"""Streamed completions with the arrival times of their tokens, in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.openai.client import OpenAIClient


@dataclass(slots=True)
class Streamed:
    """`times_s`: seconds from request to each token; tokens of one event share a time."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] if self.times_s else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first over the time from first to last, or nan."""
        span = self.times_s[-1] - self.times_s[0] if len(self.times_s) > 1 else 0.0
        return (len(self.token_ids) - 1) / span if span else float("nan")

    @property
    def second_gap(self) -> float:
        """The first gap between events over the mean of the others, or nan. A late client distorts their median."""
        times = sorted(set(self.times_s))
        return (times[1] - times[0]) * (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else float("nan")


async def stream_completion(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], into: Streamed | None = None
) -> Streamed:
    """`into`: gets the result, and keeps what came if this raises. Raises the errors of `OpenAIClient.stream`."""
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
