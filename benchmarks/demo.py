"""`make demo`: a router, a prefill and a decode engine; a real answer; then proof that nothing changed, per mode."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from pathlib import Path

import aiohttp

from baton.bench.client import Streamed, stream_completion
from baton.deployment import Deployment
from baton.openai.client import OpenAIClient
from baton.text import Tokenizer
from baton.verify.compare import acceptance
from baton.verify.observe import Case, Observed, make_cases
from baton.verify.sides import InProcess
from baton.wire import SamplingParams
from benchmarks.scrape import scrape

MODELS = Path("models")
TARGET = str(MODELS / "baton-demo-llama")
SPECULATIVE = {"method": "eagle3", "model": str(MODELS / "baton-demo-eagle3"), "num_speculative_tokens": 3}
PROMPT = "The for statement is used to iterate over"
NUM_REQUESTS = 24
MAX_TOKENS = 48


def main() -> int:
    """Returns the exit status: 0 when every answer is identical to the single engine's."""
    engine = {"model": TARGET, "speculative_config": SPECULATIVE, "batch_invariant": True}
    print(f"reference: one engine, {NUM_REQUESTS} prompts", flush=True)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=0)
    lengths = [5 + 17 * i for i in range(NUM_REQUESTS)]
    cases = make_cases(Tokenizer.load(TARGET), lengths, params)
    want = InProcess(engine).answers(cases).observed
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--batch-invariant"]
    rows = [("mode", "requests", "identical tokens", "acceptance P/D", "acceptance single", "TTFT ms", "runs/handoff")]
    different = 0
    for mode in ("push", "pull"):
        print(f"\nstarting router, prefill and decode engine ({mode})", flush=True)
        with Deployment(
            TARGET, prefill=1, decode=1, engine_flags=flags, router_flags=["--kv-mode", mode], show_progress=True
        ) as deployment:
            print(f"endpoint: {deployment.url}/v1", flush=True)
            have, runs = asyncio.run(_run(deployment.url, deployment.decode_urls[0], cases, mode == "push"))
        same = sum(
            tuple(h.token_ids) == w.token_ids and tuple(h.accepted) == w.accepted
            for h, w in zip(have, want, strict=True)
        )
        different += len(cases) - same
        ttft_ms = statistics.median(h.ttft_s for h in have) * 1000
        observed = [
            Observed(accepted=tuple(h.accepted), num_speculative_tokens=w.num_speculative_tokens)
            for h, w in zip(have, want, strict=True)
        ]
        rows.append(
            (
                mode,
                str(len(cases)),
                f"{same}/{len(cases)}",
                _rates(acceptance(observed)),
                _rates(acceptance(want)),
                f"{ttft_ms:.1f}",
                f"{runs:.1f}",
            )
        )
    print()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\nall processes have ended" if different == 0 else f"\n{different} answers differ")
    return 1 if different else 0


async def _run(url: str, decode_url: str, cases: list[Case], show: bool) -> tuple[list[Streamed], float]:
    """Answers to all cases, one after the other, and the mean of runs per handoff."""
    async with aiohttp.ClientSession() as session:
        if show:
            await _show_answer(session, url)
        runs_before = sum(await scrape(session, decode_url, "baton:handoff_runs"))
        handoffs_before = sum(await scrape(session, decode_url, "baton:handoffs"))
        answers = []
        for case in cases:
            body = {
                "prompt": list(case.prompt_token_ids),
                "max_tokens": case.params.max_tokens,
                "temperature": 0.0,
                "seed": 0,
            }
            answers.append(await stream_completion(session, url, body))
        runs = sum(await scrape(session, decode_url, "baton:handoff_runs")) - runs_before
        handoffs = sum(await scrape(session, decode_url, "baton:handoffs")) - handoffs_before
    return answers, runs / max(handoffs, 1.0)


async def _show_answer(session: aiohttp.ClientSession, url: str) -> None:
    print(f"\nprompt: {PROMPT}\nanswer:", end="", flush=True)
    body = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0.0}
    async for event in OpenAIClient(session, url).stream(body):
        for choice in event.choices:
            print(choice.text, end="", flush=True)
    print("\n", flush=True)


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.4f}" for rate in rates)


if __name__ == "__main__":
    sys.exit(main())
