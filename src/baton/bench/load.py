"""Streamed requests to an OpenAI server at given times, with their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.load_figures import RequestOutcome
from baton.bench.load_requests import LoadRequest
from baton.bench.progress_bar import progress_bar
from baton.errors import BatonError, EngineUnavailableError
from baton.event_loop import timeout
from baton.openai.client import OpenAIClient, connected_client

_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Load:
    """`due_s`: seconds from the start. `max_concurrency`: in flight; further due requests wait. `extra`: fields of each
    body. `request_timeout_s`: to an answer's end; None: no limit."""

    requests: Sequence[LoadRequest]
    due_s: Sequence[float]
    max_concurrency: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    request_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Outcomes are in the order of the requests. `before`, `after`: `spec_decode_counters`."""

    model: str
    outcomes: list[RequestOutcome]
    duration_s: float
    before: dict[str, float] | None
    after: dict[str, float] | None


async def run_load(
    url: str, load: Load, model: str | None = None, num_warmups: int = 0, key: str | None = None
) -> LoadRun:
    """Warm up with the first request, then send all when they are due. A failed request is an outcome, not an error.

    Raises as `OpenAIClient.model`, and `EngineUnavailableError` if a warm-up request fails.
    """
    async with connected_client(url, load.request_timeout_s, key) as client:
        model = model or (await client.model()).id
        gate = asyncio.Semaphore(load.max_concurrency or max(len(load.requests), num_warmups, 1))
        warm = [_ask(client, model, load.requests[0], load.extra, gate, 0.0) for _ in range(num_warmups)]
        for outcome in await asyncio.gather(*warm):
            if outcome.error:
                raise EngineUnavailableError(f"a request to warm up failed: {outcome.error}")
        before = await spec_decode_counters(client)
        tasks = []
        with progress_bar(len(load.requests), "request") as shown:
            begin = time.perf_counter()
            for request, due in zip(load.requests, load.due_s, strict=True):
                wait = begin + due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                task = asyncio.create_task(_ask(client, model, request, load.extra, gate, begin + due))
                task.add_done_callback(lambda _: shown.update())
                tasks.append(task)
            outcomes = await asyncio.gather(*tasks)
        duration = time.perf_counter() - begin
        return LoadRun(model, outcomes, duration, before, await spec_decode_counters(client))


async def spec_decode_counters(client: OpenAIClient, timeout_s: float = 30.0) -> dict[str, float] | None:
    """Sums of a server's counters, by `drafts`, `draft_tokens`, `accepted` and position. None without
    `/metrics`."""
    counters: dict[str, float] = {}
    with contextlib.suppress(BatonError, asyncio.TimeoutError):
        async with timeout(timeout_s):
            samples = await client.samples()
        for sample in samples:
            name = sample.labels.get("position") if sample.name == _PER_POSITION else _COUNTERS.get(sample.name)
            if name is not None and (sample.name != _PER_POSITION or name.isdecimal()):
                counters[name] = counters.get(name, 0.0) + sample.value
        return counters
    return None


async def _ask(
    client: OpenAIClient, model: str, request: LoadRequest, extra: dict[str, Any], gate: asyncio.Semaphore, due: float
) -> RequestOutcome:
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "stream_options": {"include_usage": True},
        **extra,
    }
    outcome = RequestOutcome(len(request.prompt))
    usage = None
    async with gate:
        outcome.start_time = last = time.perf_counter()
        outcome.queue_time = outcome.start_time - due if due else 0.0
        try:
            async with contextlib.aclosing(client.stream(body)) as events:
                async for event in events:
                    usage = event.usage or usage
                    if not event.choices:
                        continue
                    now = time.perf_counter()
                    if outcome.ttft:
                        outcome.itl.append(now - last)
                    else:
                        outcome.ttft = now - last
                    last = now
                    outcome.text += event.choices[0].text or ""
            outcome.latency = last - outcome.start_time
            if not outcome.ttft:
                outcome.error = "the answer has no tokens"
            elif usage is None:
                outcome.error = "the server does not tell usage, so its tokens cannot be counted"
            else:
                outcome.prompt_len, outcome.output_len = usage.prompt_tokens, usage.completion_tokens
        except BatonError as error:
            outcome.error = str(error) or type(error).__name__
    return outcome
