"""Weights in int8 against bfloat16: tokens per second, perplexity of this repository's documentation, and acceptance of
an EAGLE-3 head's drafts by position, greedy.

    python -m benchmarks.engine.int8 [MODEL HEAD] [--parts speed perplexity acceptance]

Models run in turns. Ratios are int8 over bfloat16: medians, with their range. For acceptance both continue bfloat16's
answers, cut every 16 tokens; intervals of 95% are of resampled chats.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from baton.engine.llm import LLM
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS
from baton.sampling_params import SamplingParams
from benchmarks.smollm2 import QUESTIONS, chat_ids, smollm2

_DOCS = Path(__file__).parents[2] / "docs"
_WINDOW, _NUM_WINDOWS = 512, 8
_HEAD = "models/baton-smollm2-eagle3"
_MANNERS = ("", "In one sentence: ", "Explain to an expert: ", "Answer at length. ")
_NUM_DRAFTS, _ANSWER, _PIECE = 3, 192, 16
_RESAMPLES = 2000
_PARTS = ("speed", "perplexity", "acceptance")
Counts = list[int]


def seconds(llm: LLM, batch: int, num_prompt_tokens: int, num_tokens: int, turn: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompts = [[(7 * i + 13 * j + turn) % 40000 + 5 for i in range(num_prompt_tokens)] for j in range(batch)]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def perplexity(llm: LLM) -> float:
    text = "\n".join(path.read_text("utf-8") for path in sorted(_DOCS.glob("*.md")))
    ids = llm._engine.tokenizer.encode(text)[: _WINDOW * _NUM_WINDOWS]
    windows = [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]
    losses: list[float] = []
    for result in llm.generate(windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)):
        rows = result.prompt_logprobs or []
        losses += [-row.logprob for row in rows if row is not None]
    return math.exp(statistics.fmean(losses))


def chats_of(llm: LLM) -> list[list[list[int]]]:
    tokenizer = llm._engine.tokenizer
    chats = [chat_ids(tokenizer, "".join(parts)) for parts in itertools.product(_MANNERS, QUESTIONS)]
    answers = llm.generate(chats, SamplingParams(max_tokens=_ANSWER, temperature=0.0))
    return [
        [chat + list(answer.outputs[0].token_ids[:cut]) for cut in range(0, len(answer.outputs[0].token_ids), _PIECE)]
        for chat, answer in zip(chats, answers, strict=True)
    ]


def continued(llm: LLM, contexts: list[list[int]]) -> Counts:
    """Verifications, and accepted drafts."""
    before = counts_of(llm)
    llm.generate(contexts, SamplingParams(max_tokens=_PIECE, temperature=0.0))
    return [after - count for after, count in zip(counts_of(llm), before, strict=True)]


def counts_of(llm: LLM) -> Counts:
    accepted = llm.metrics.accepted_per_pos
    return [llm.metrics.num_drafts, *accepted, *[0] * (_NUM_DRAFTS - len(accepted))]


def rates(chats: Sequence[Counts]) -> list[float]:
    verifications, *accepted = map(sum, zip(*chats, strict=True))
    return [count / verifications for count in accepted]


def interval(wide: list[Counts], narrow: list[Counts], position: int) -> tuple[float, float]:
    random, found = Random(0), []
    for _ in range(_RESAMPLES):
        some = random.choices(range(len(wide)), k=len(wide))
        before, after = rates([wide[i] for i in some]), rates([narrow[i] for i in some])
        found.append(after[position] - before[position])
    found.sort()
    return found[_RESAMPLES // 40], found[-_RESAMPLES // 40]


def compare_acceptance(model: str, head: str, settings: dict[str, Any]) -> None:
    spec = {"method": "eagle3", "model": head, "num_speculative_tokens": _NUM_DRAFTS}
    with (
        LLM(model, speculative_config=spec, **settings) as wide,
        LLM(model, speculative_config=spec, quantization="int8", **settings) as narrow,
    ):
        chats = chats_of(wide)
        before, after = ([continued(llm, contexts) for contexts in chats] for llm in (wide, narrow))
    print(f"acceptance             {sum(map(len, chats))} contexts of {len(chats)} chats, "
          f"{sum(chat[0] for chat in before)} verifications")  # fmt: skip
    for position, (one, other) in enumerate(zip(rates(before), rates(after), strict=True)):
        low, high = interval(before, after, position)
        print(
            f"acceptance, draft {position + 1}    {one:.3f} -> {other:.3f}, difference {other - one:+.3f} "
            f"({low:+.3f} to {high:+.3f})"
        )


def compare_speed(wide: LLM, narrow: LLM, turns: int) -> None:
    for what, batch, prompt, output in (
        ("40 tokens, 1 request", 1, 16, 40),
        ("30 tokens, 8 requests", 8, 16, 30),
        ("prompt of 512 tokens", 1, 512, 1),
    ):
        ratios, times = [], []
        for turn in range(turns + 1):
            bfloat16 = seconds(wide, batch, prompt + turn, output, turn)
            int8 = seconds(narrow, batch, prompt + turn, output, turn)
            if turn:  # the first compiles
                ratios.append(bfloat16 / int8)
                times.append(1e3 * bfloat16 / output)
        low, high = min(ratios), max(ratios)
        print(
            f"{what:22} bfloat16 {statistics.median(times):.1f} ms a token; speed of int8 over it "
            f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("head", nargs="?", default=_HEAD)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    options = parser.parse_args()
    if not HAS_INT8_PRODUCTS:
        raise SystemExit("this CPU has no AVX2")
    model = options.model or str(smollm2())
    settings = {"dtype": "bfloat16", "kv_cache_memory": 1 << 28}
    if set(options.parts) & {"speed", "perplexity"}:
        with LLM(model, **settings) as wide, LLM(model, quantization="int8", **settings) as narrow:
            if "speed" in options.parts:
                compare_speed(wide, narrow, options.turns)
            if "perplexity" in options.parts:
                before, after = perplexity(wide), perplexity(narrow)
                print(f"perplexity             {before:.3f} -> {after:.3f}, ratio {after / before:.4f}", flush=True)
    if "acceptance" in options.parts:
        compare_acceptance(model, options.head, settings)


if __name__ == "__main__":
    main()
