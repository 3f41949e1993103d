"""TTFT of a P/D deployment over that of one engine, requests of both alternating in one run."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from baton.bench.client import stream_completion
from baton.processes import Deployment
from baton.text import Tokenizer
from baton.verify.observe import make_cases, served_model
from baton.wire import SamplingParams


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """Medians in milliseconds; `ttft_ratio` is the median of pairwise ratios, with its quartiles."""

    num_pairs: int
    single_ttft_ms: float
    pd_ttft_ms: float
    ttft_ratio: float
    ttft_ratio_quartiles: tuple[float, float]
    single_tokens_per_s: float
    pd_tokens_per_s: float


def measure(
    model: str,
    speculative_config: dict[str, Any] | None,
    prompt_tokens: int = 512,
    num_pairs: int = 30,
    mode: str = "push",
    max_tokens: int = 32,
    split_flags: Sequence[str] = (),
) -> ServeFigures:
    """Both deployments run side by side behind a router each; only one of them is asked at a time.

    `split_flags` are further flags of the P/D engines alone.
    """
    flags = ["--no-enable-prefix-caching"]
    if speculative_config is not None:
        flags += ["--speculative-config", json.dumps(speculative_config)]
    with (
        Deployment(model, prefill=0, decode=0, both=1, engine_flags=flags) as single,
        Deployment(
            model, prefill=1, decode=1, engine_flags=[*flags, *split_flags], router_flags=["--kv-mode", mode]
        ) as split,
    ):
        return asyncio.run(_measure(model, single.url, split.url, prompt_tokens, num_pairs, max_tokens))


async def _measure(
    model: str, single: str, split: str, prompt_tokens: int, num_pairs: int, max_tokens: int
) -> ServeFigures:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    cases = make_cases(Tokenizer.load(model), [prompt_tokens] * (num_pairs + 3), params)
    name = await served_model(single)
    ttft: dict[str, list[float]] = {single: [], split: []}
    speed: dict[str, list[float]] = {single: [], split: []}
    async with aiohttp.ClientSession() as session:
        for index, case in enumerate(cases):
            body = {
                "model": name,
                "prompt": list(case.prompt_token_ids),
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            # Alternating which side goes first keeps drift and cache effects out of the ratio.
            for url in (single, split) if index % 2 else (split, single):
                answer = await stream_completion(session, url, body)
                if index >= 3:
                    ttft[url].append(answer.ttft_s)
                    speed[url].append(answer.tokens_per_s)
                await asyncio.sleep(0.05)
    ratios = sorted(b / a for a, b in zip(ttft[single], ttft[split], strict=True))
    return ServeFigures(
        num_pairs,
        statistics.median(ttft[single]) * 1e3,
        statistics.median(ttft[split]) * 1e3,
        statistics.median(ratios),
        (ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]),
        statistics.median(speed[single]),
        statistics.median(speed[split]),
    )
