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
from baton.bench.timed_stream import Streamed, stream_completion
from baton.deployment import Deployment
from baton.openai.client import connected_client
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import make_cases

WARM_UP = 3
BREAK_S = 0.05


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """Medians; ranges: least, most. `ttft_ratio`: the median of pairwise ratios, candidate over reference, with
    quartiles; `ttft_ratio_interval`: the 95 % confidence interval of their geometric mean."""

    num_pairs: int
    reference_ttft_ms: float
    ttft_ms: float
    ttft_ratio: float
    ttft_ratio_quartiles: tuple[float, float]
    ttft_ratio_interval: tuple[float, float]
    reference_tokens_per_s: float
    tokens_per_s: float
    reference_second_gap: float
    reference_second_gap_range: tuple[float, float]
    second_gap: float
    second_gap_range: tuple[float, float]


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
    """By URL: single requests, in turns."""
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
    answers: dict[str, list[Streamed]] = {reference: [], candidate: []}
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
                    answers[url].append(answer)
                await asyncio.sleep(BREAK_S)
    return compare(answers[reference], answers[candidate])


def compare(reference: Sequence[Streamed], candidate: Sequence[Streamed]) -> ServeFigures:
    ratios = sorted(b.ttft_s / a.ttft_s for a, b in zip(reference, candidate, strict=True))
    reference_gaps, gaps = ([answer.second_gap for answer in side] for side in (reference, candidate))
    return ServeFigures(
        num_pairs=len(ratios),
        reference_ttft_ms=statistics.median(answer.ttft_s for answer in reference) * 1e3,
        ttft_ms=statistics.median(answer.ttft_s for answer in candidate) * 1e3,
        ttft_ratio=statistics.median(ratios),
        ttft_ratio_quartiles=(ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]),
        ttft_ratio_interval=confidence_interval(ratios),
        reference_tokens_per_s=statistics.median(answer.tokens_per_s for answer in reference),
        tokens_per_s=statistics.median(answer.tokens_per_s for answer in candidate),
        reference_second_gap=statistics.median(reference_gaps),
        reference_second_gap_range=(min(reference_gaps), max(reference_gaps)),
        second_gap=statistics.median(gaps),
        second_gap_range=(min(gaps), max(gaps)),
    )


def confidence_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the geometric mean, by the normal approximation of the mean of logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean + half)
