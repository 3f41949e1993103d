"""TTFT and decode speed of two deployments, with alternating requests in one run."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from baton.bench.progress_bar import with_progress
from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.openai.client import connected_client
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import make_cases

WARM_UP = 3
BREAK_S = 0.05


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """Medians. `ttft_ratio`: the median of pairwise ratios, candidate over reference, with quartiles;
    `ttft_ratio_interval`: the 95 % confidence interval of their geometric mean."""

    num_pairs: int
    reference_ttft_ms: float
    ttft_ms: float
    ttft_ratio: float
    ttft_ratio_quartiles: tuple[float, float]
    ttft_ratio_interval: tuple[float, float]
    reference_tokens_per_s: float
    tokens_per_s: float
    reference_second_gap: float
    second_gap: float


def measure_deployments(
    model: str,
    speculative_config: dict[str, Any] | None,
    prompt_tokens: int = 512,
    num_pairs: int = 30,
    mode: str = "push",
    max_tokens: int = 32,
    engine_flags: Sequence[str] = (),
) -> ServeFigures:
    """A P/D deployment (the candidate) against one engine. `engine_flags`: for P and D only."""
    flags = deployment_flags(speculative_config)
    with (
        Deployment(model, prefill=0, decode=0, both=1, engine_flags=flags) as single,
        Deployment(model, engine_flags=[*flags, *engine_flags], router_flags=["--kv-mode", mode]) as split,
    ):
        return alternate(model, single.url, split.url, prompt_tokens, num_pairs, max_tokens)


def alternate(
    model: str, reference: str, candidate: str, prompt_tokens: int, num_pairs: int, max_tokens: int
) -> ServeFigures:
    """By URL, one request at a time, in turns."""
    return asyncio.run(_measure(model, reference, candidate, prompt_tokens, num_pairs, max_tokens))


def deployment_flags(speculative_config: dict[str, Any] | None) -> list[str]:
    flags = ["--no-enable-prefix-caching"]
    if speculative_config is not None:
        flags += ["--speculative-config", json.dumps(speculative_config)]
    return flags


async def _measure(
    model: str, reference: str, candidate: str, prompt_tokens: int, num_pairs: int, max_tokens: int
) -> ServeFigures:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    cases = make_cases(Tokenizer.load(model), [prompt_tokens] * (num_pairs + WARM_UP), params)
    async with connected_client(reference, 30.0) as client:
        name = (await client.model()).id
    ttft: dict[str, list[float]] = {reference: [], candidate: []}
    speed: dict[str, list[float]] = {reference: [], candidate: []}
    second: dict[str, list[float]] = {reference: [], candidate: []}
    async with aiohttp.ClientSession() as session:
        for index, case in enumerate(with_progress(cases, "pair")):
            body = {
                "model": name,
                "prompt": list(case.prompt_token_ids),
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            # Against drift and caches.
            for url in (reference, candidate) if index % 2 else (candidate, reference):
                answer = await stream_completion(session, url, body)
                if index >= WARM_UP:
                    ttft[url].append(answer.ttft_s)
                    speed[url].append(answer.tokens_per_s)
                    second[url].append(answer.second_gap)
                await asyncio.sleep(BREAK_S)
    ratios = sorted(b / a for a, b in zip(ttft[reference], ttft[candidate], strict=True))
    return ServeFigures(
        num_pairs,
        statistics.median(ttft[reference]) * 1e3,
        statistics.median(ttft[candidate]) * 1e3,
        statistics.median(ratios),
        (ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]),
        confidence_interval(ratios),
        statistics.median(speed[reference]),
        statistics.median(speed[candidate]),
        statistics.median(second[reference]),
        statistics.median(second[candidate]),
    )


def confidence_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the geometric mean, by the normal approximation of the mean of logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean + half)
