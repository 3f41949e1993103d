"""One handoff through a router, with counters of router and engines."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.samples import Sample

from baton.doctor.checkup import Trial
from baton.errors import BatonError
from baton.openai.answers import decode_answer, printable_line
from baton.openai.client import OpenAIClient, connected_client

_PROMPT_TOKENS, _MAX_TOKENS = 512, 8
# Ids that vocabularies of all sizes have.
_IDS = range(3, 250)
_BYTES = ("baton:handoff_bytes_total", "vllm:baton_handoff_bytes_total", "vllm:nixl_bytes_transferred_sum")
_RUNS = ("baton:handoff_runs_total", "vllm:baton_handoff_runs_total", "vllm:nixl_num_descriptors_sum")
_REFUSED = "baton:handoff_refused_total"
# BatonConnector's counter and outcomes. Its server computes a request itself if the leg is refused or fails.
_OUTCOMES, _LEG_REFUSED, _FAILED = "vllm:baton_handoffs_total", "refused", "failed_"
_POLLS, _POLL_S = 100, 0.1


class _Handoffs(msgspec.Struct, frozen=True):
    started: int = 0
    completed: int = 0
    finished_early: int = 0
    aborted: int = 0
    failed: int = 0
    active: int = 0
    failures: dict[str, int] = {}

    def counts(self) -> Counter[str]:
        names = ("started", "completed", "finished_early", "aborted", "failed")
        return Counter({name: getattr(self, name) for name in names})

    @property
    def settled(self) -> bool:
        return not self.active


class _Status(msgspec.Struct, frozen=True):
    handoffs: _Handoffs
    decisions: dict[str, Any] = {}

    def places(self) -> Counter[str]:
        return Counter({name: count for name, count in self.decisions.items() if isinstance(count, int)})


class _Counts:
    def __init__(self, status: _Status, samples: Sequence[Sample]) -> None:
        self.status, self.samples = status, samples

    def sum(self, names: Sequence[str]) -> int | None:
        values = [sample.value for sample in self.samples if sample.name in names]
        return int(sum(values)) if values else None

    def refused(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for sample in self.samples:
            if sample.name == _REFUSED:
                counts[sample.labels.get("kind", "")] += int(sample.value)
        if legs := self._outcomes()[_LEG_REFUSED]:
            counts["leg"] = legs
        return counts

    def failures(self) -> Counter[str]:
        legs = {name: count for name, count in self._outcomes().items() if name.startswith(_FAILED)}
        return Counter(self.status.handoffs.failures) + Counter(legs)

    def _outcomes(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for sample in self.samples:
            if sample.name == _OUTCOMES:
                counts[sample.labels.get("outcome", "")] += int(sample.value)
        return counts


async def try_handoff(url: str, max_model_len: int | None, timeout_s: float, api_key: str | None) -> Trial:
    """Sends random ids, which no cache holds. Raises the errors of `OpenAIClient` if the router reports no model or no
    counters."""
    num_prompt = min(_PROMPT_TOKENS, (max_model_len or _PROMPT_TOKENS) // 2)
    prompt = random.SystemRandom().choices(_IDS, k=max(num_prompt, 2))
    async with connected_client(url, timeout_s, api_key) as client:
        model = await client.model()
        before = await _counts(client)
        body = {"model": model.id, "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        first, num_tokens, problem = None, 0, None
        try:
            async for event in client.stream({**body, "return_token_ids": True}):
                came = sum(len(choice.token_ids or ()) or bool(choice.text) for choice in event.choices)
                if came and first is None:
                    first = time.monotonic()
                num_tokens += came
        except BatonError as error:
            problem = printable_line(str(error))
        ended = time.monotonic()
        if problem is None and first is None:
            problem = "no token came"
        after = await _settled(client)
    return Trial(
        num_prompt_tokens=len(prompt),
        num_tokens=num_tokens,
        ttft_s=(first or ended) - began,
        total_s=ended - began,
        problem=problem,
        handoffs=_positive(after.status.handoffs.counts(), before.status.handoffs.counts()),
        failures=_positive(after.failures(), before.failures()),
        decisions=_positive(after.status.places(), before.status.places()),
        refused=_positive(after.refused(), before.refused()),
        num_bytes=_increase(after.sum(_BYTES), before.sum(_BYTES)),
        num_runs=_increase(after.sum(_RUNS), before.sum(_RUNS)),
    )


async def _counts(client: OpenAIClient) -> _Counts:
    status = decode_answer(await client.fetch("GET", f"{client.url}/status"), _Status)
    return _Counts(status, await client.samples())


async def _settled(client: OpenAIClient) -> _Counts:
    """Waits, for a limited time, until no handoff runs."""
    counts = await _counts(client)
    for _ in range(_POLLS):
        if counts.status.handoffs.settled:
            break
        await asyncio.sleep(_POLL_S)
        counts = await _counts(client)
    return counts


def _positive(after: Counter[str], before: Counter[str]) -> Mapping[str, int]:
    return dict(after - before)


def _increase(after: int | None, before: int | None) -> int | None:
    return None if after is None else after - (before or 0)
