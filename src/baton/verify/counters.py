"""Acceptance from the Prometheus counters of engines, with vLLM's names (`vllm:`) or Baton's (`baton:`)."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from prometheus_client.samples import Sample

from baton.errors import EngineUnavailableError, ProtocolError
from baton.openai.answers import printable_line
from baton.openai.client import OpenAIClient, base_url
from baton.verify.acceptance_check import Acceptance

MAX_POSITIONS = 1024
_PREFIXES = ("vllm:", "baton:")
_DRAFTS = "spec_decode_num_drafts_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_per_pos_total"
_MAX_COUNT = 2**53
_POLL_S = 0.5
_POLLS = 40


def metrics_urls(text: str, field: str) -> tuple[str, ...]:
    """Metrics URLs from comma-separated URLs of engines or metrics. Raises `ConfigError` for `field`."""
    urls = [base_url(part.strip(), field) for part in text.split(",")]
    return tuple(url if url.endswith("/metrics") else f"{url}/metrics" for url in urls)


def count_drafts(samples: Sequence[Sample]) -> Acceptance | None:
    """The sum over engines and labels; None without such counters. Baton's engines have both names; only one is summed.
    Raises `ProtocolError`."""
    prefix = next((p for p in _PREFIXES if any(sample.name == p + _DRAFTS for sample in samples)), None)
    if prefix is None:
        return None
    num_drafts = 0
    accepted: Counter[int] = Counter()
    try:
        for sample in samples:
            if sample.name == prefix + _DRAFTS:
                num_drafts += _count(sample.value)
            elif sample.name == prefix + _ACCEPTED:
                accepted[int(sample.labels["position"])] += _count(sample.value)
    except (ValueError, KeyError) as error:
        raise ProtocolError(f"the metrics are malformed: {printable_line(str(error))}") from None
    if any(not 0 <= position < MAX_POSITIONS for position in accepted):
        raise ProtocolError(f"the metrics are malformed: draft positions must be below {MAX_POSITIONS}")
    return Acceptance(num_drafts, tuple(accepted[position] for position in range(max(accepted, default=-1) + 1)))


async def read_counters(client: OpenAIClient, urls: Sequence[str]) -> Acceptance:
    """The sum over `urls`. Raises `EngineUnavailableError` without counters, `ProtocolError`."""
    total = Acceptance(0, ())
    for url in urls:
        try:
            counts = count_drafts(await client.samples(url))
        except ProtocolError as error:
            raise ProtocolError(f"{url}: {error}") from None
        if counts is None:
            raise EngineUnavailableError(f"{url} has no counters of speculative decoding ({_DRAFTS})")
        total = total + counts
    return total


async def read_settled(client: OpenAIClient, urls: Sequence[str]) -> Acceptance:
    """Waits until the counters stop changing: an engine may count its last step after the answer."""
    counts = await read_counters(client, urls)
    for _ in range(_POLLS):
        await asyncio.sleep(_POLL_S)
        before, counts = counts, await read_counters(client, urls)
        if counts == before:
            return counts
    raise ProtocolError("the counters keep changing: other requests run on these engines")


async def read_handed_back(client: OpenAIClient) -> int:
    samples = await client.samples()
    done = [s for s in samples if s.name == "baton:router_hand_backs_total" and s.labels.get("outcome") == "completed"]
    return sum(_count(sample.value) for sample in done)


def _count(value: float) -> int:
    if not (math.isfinite(value) and 0 <= value < _MAX_COUNT and value == int(value)):
        raise ValueError(f"{value} is not a count")
    return int(value)
