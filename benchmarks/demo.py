"""`make demo`: a router, a prefill and a decode engine answer a question; then all answers are compared, per mode."""

from __future__ import annotations

import asyncio
import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai

from baton.bench.timed_stream import Streamed, stream_completion
from baton.deployment import Deployment
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.compare import acceptance_rates
from baton.verify.observe import Case, Observed, make_cases
from baton.verify.sides import EngineSide
from benchmarks.scrape import scrape
from benchmarks.smollm2 import QUESTIONS, NotAvailableError, chat_ids, smollm2

MODELS = Path("models")
# The model of this repository, which other benchmarks use too.
TARGET = str(MODELS / "baton-demo-llama")
SPECULATIVE = {"method": "eagle3", "model": str(MODELS / "baton-demo-eagle3"), "num_speculative_tokens": 3}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its EAGLE-3 head if any, the question to show, and the requests of the table."""

    target: str
    head: Path
    question: str
    cases: list[Case]

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        if not self.head.is_dir():
            return None
        return {**SPECULATIVE, "model": str(self.head)}

    @property
    def flags(self) -> list[str]:
        """Flags of `baton up` and of each engine."""
        spec = self.speculative_config
        return ["--batch-invariant"] + (["--speculative-config", json.dumps(spec)] if spec else [])


def choose() -> Subject:
    """SmolLM2 with chat questions, or this repository's model with text of many lengths."""
    params = SamplingParams(max_tokens=32, temperature=0.0, logprobs=0)
    try:
        target = str(smollm2())
    except NotAvailableError as error:
        print(f"going on with a small model, since SmolLM2 cannot be had: {error}", flush=True)
        cases = make_cases(Tokenizer.load(TARGET), [5 + 17 * i for i in range(24)], params)
        return Subject(TARGET, Path(str(SPECULATIVE["model"])), "What is the for statement?", cases)
    tokenizer = Tokenizer.load(target)
    cases = [Case(tuple(chat_ids(tokenizer, question)), params) for question in QUESTIONS]
    return Subject(target, MODELS / "baton-smollm2-eagle3", QUESTIONS[0], cases)


def main() -> int:
    """Returns the exit status: 0 if every answer is identical to the single engine's."""
    subject = choose()
    cases = subject.cases
    print(
        f"model: {subject.target}\nreference: one engine, {len(cases)} prompts; the first one compiles kernels",
        flush=True,
    )
    engine = {"model": subject.target, "speculative_config": subject.speculative_config, "batch_invariant": True}
    want = EngineSide(engine).answers(cases).observed
    rows: list[tuple[str, ...]] = [
        ("mode", "requests", "identical tokens", "acceptance P/D", "acceptance single", "TTFT ms", "runs/handoff")
    ]
    different = 0
    for mode in ("push", "pull"):
        print(f"\nstarting router, prefill and decode engine ({mode})", flush=True)
        with Deployment(
            subject.target,
            prefill=1,
            decode=1,
            engine_flags=subject.flags,
            router_flags=["--kv-mode", mode],
            on_progress=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
        ) as deployment:
            print(f"endpoint: {deployment.url}/v1", flush=True)
            question = subject.question if mode == "push" else None
            have, runs = asyncio.run(_run(deployment.url, deployment.decode_urls[0], cases, question))
        observed = [
            Observed(accepted=tuple(h.accepted), num_speculative_tokens=w.num_speculative_tokens)
            for h, w in zip(have, want, strict=True)
        ]
        same = sum(
            tuple(h.token_ids) == w.token_ids and tuple(h.accepted) == (w.accepted or ())
            for h, w in zip(have, want, strict=True)
        )
        different += len(cases) - same
        ttft_ms = statistics.median(h.ttft_s for h in have) * 1000
        rates = [_rates(acceptance_rates(side)) if subject.speculative_config else "-" for side in (observed, want)]
        rows.append((mode, str(len(cases)), f"{same}/{len(cases)}", *rates, f"{ttft_ms:.1f}", f"{runs:.1f}"))
    print()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\nall processes have ended" if different == 0 else f"\n{different} answers differ")
    print(f"to serve it yourself: {shlex.join(['.venv/bin/baton', 'up', subject.target, *subject.flags[1:]])}")
    return 1 if different else 0


async def _run(url: str, decode_url: str, cases: list[Case], question: str | None) -> tuple[list[Streamed], float]:
    """Run all cases one after the other. Returns the answers and the mean number of runs per handoff. A `question` is
    answered first.
    """
    if question is not None:
        await _show_answer(url, question)
    async with aiohttp.ClientSession() as session:
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


async def _show_answer(url: str, question: str) -> None:
    """Ask with OpenAI's own client and print the answer as it arrives."""
    print(f"\nquestion: {question}\nanswer: ", end="", flush=True)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            temperature=0.0,
            stream=True,
        )
        async for event in answer:
            print(event.choices[0].delta.content or "" if event.choices else "", end="", flush=True)
    print("\n", flush=True)


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.4f}" for rate in rates)


if __name__ == "__main__":
    sys.exit(main())
