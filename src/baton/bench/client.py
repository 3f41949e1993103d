"""A streaming client that takes times: first token and gaps between tokens, in seconds."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.errors import BatonError


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
    ttft_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first over the time from first to last."""
        span = self.times_s[-1] - self.times_s[0] if len(self.times_s) > 1 else 0.0
        return (len(self.token_ids) - 1) / span if span else float("nan")


async def stream_completion(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Streamed:
    """`POST {url}/v1/completions`, streamed. Raises BatonError with the server's message on any failure."""
    result = Streamed()
    started = time.perf_counter()
    body = {**body, "stream": True, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise BatonError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise BatonError(str(event["error"]))
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    result.times_s += [time.perf_counter() - started] * len(choice["token_ids"])
                    result.token_ids += choice["token_ids"]
                result.text += choice["text"]
                if choice.get("logprobs"):
                    result.logprobs += choice["logprobs"]["token_logprobs"]
                result.finish_reason = choice["finish_reason"] or result.finish_reason
                if choice.get("spec_decode"):
                    result.accepted = choice["spec_decode"]["accepted"]
    result.ttft_s = result.times_s[0] if result.times_s else float("nan")
    return result


async def scrape(session: aiohttp.ClientSession, url: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels, in `GET {url}/metrics`; 0.0 when there is none."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    pattern = re.compile(rf"^{re.escape(name)}(?:_total)?({{[^}}]*}})? ([0-9.e+-]+)$", re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for given, value in pattern.findall(text) if all(label in given for label in wanted))
