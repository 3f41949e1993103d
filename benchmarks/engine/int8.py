"""Weights in int8 against bfloat16: tokens per second, perplexity of this repository's documentation, and acceptance of
an EAGLE-3 head's drafts by position, greedy.

    python -m benchmarks.engine.int8 [MODEL HEAD]

Both models run in this process, in turns. Ratios are int8 over bfloat16: medians, with their range. The default is
SmolLM2-135M-Instruct, whose weights come from 4-bit numbers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

from baton.engine.llm import LLM
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.sampling_params import SamplingParams
from benchmarks.smollm2 import QUESTIONS, chat_ids, smollm2

_DOCS = Path(__file__).parents[2] / "docs"
_WINDOW, _NUM_WINDOWS = 512, 8
_HEAD = "models/baton-smollm2-eagle3"
_MANNERS = ("", "In one sentence: ", "Explain to an expert: ", "Answer at length. ")
_NUM_DRAFTS, _ANSWER = 3, 192


def seconds(llm: LLM, batch: int, num_prompt_tokens: int, num_tokens: int, turn: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompts = [[(7 * i + 13 * j + turn) % 40000 + 5 for i in range(num_prompt_tokens)] for j in range(batch)]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def perplexity(llm: LLM) -> float:
    """Of `_NUM_WINDOWS` windows of `_WINDOW` tokens."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(_DOCS.glob("*.md")))
    ids = llm._engine.tokenizer.encode(text)[: _WINDOW * _NUM_WINDOWS]
    windows = [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]
    losses: list[float] = []
    for result in llm.generate(windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)):
        rows = result.prompt_logprobs or []
        losses += [-row.logprob for row in rows if row is not None]
    return math.exp(statistics.fmean(losses))


def acceptance(model: str, head: str, **settings: Any) -> list[float]:
    """Accepted drafts per verification, by position."""
    spec = {"method": "eagle3", "model": head, "num_speculative_tokens": _NUM_DRAFTS}
    with LLM(model, speculative_config=spec, **settings) as llm:
        tokenizer = llm._engine.tokenizer
        chats = [chat_ids(tokenizer, "".join(parts)) for parts in itertools.product(_MANNERS, QUESTIONS)]
        llm.generate(chats, SamplingParams(max_tokens=_ANSWER, temperature=0.0))
        metrics = llm.metrics
    return [count / metrics.num_drafts for count in metrics.accepted_per_pos]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("head", nargs="?", default=_HEAD)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    if not HAS_BF16_PAIRS:
        raise SystemExit("this CPU has no AVX-512 BF16")
    model = options.model or str(smollm2())
    settings = {"dtype": "bfloat16", "kv_cache_memory": 1 << 28}
    with LLM(model, **settings) as wide, LLM(model, quantization="int8", **settings) as narrow:
        for what, batch, prompt, output in (
            ("40 tokens, 1 request", 1, 16, 40),
            ("30 tokens, 8 requests", 8, 16, 30),
            ("prompt of 512 tokens", 1, 512, 1),
        ):
            ratios, times = [], []
            for turn in range(options.turns + 1):
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
        before, after = perplexity(wide), perplexity(narrow)
        print(f"perplexity             {before:.3f} -> {after:.3f}, ratio {after / before:.4f}", flush=True)
    rates = (
        acceptance(model, options.head, **settings),
        acceptance(model, options.head, quantization="int8", **settings),
    )
    for position, (before, after) in enumerate(zip(*rates, strict=True)):
        print(f"acceptance, draft {position + 1}    {before:.3f} -> {after:.3f}, difference {after - before:+.3f}")


if __name__ == "__main__":
    main()
