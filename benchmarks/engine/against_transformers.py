"""One engine against `transformers` on the same threads of this machine, both in this process, in turns.

    python -m benchmarks.engine.against_transformers MODEL

`transformers` runs `generate` as its users do: SDPA attention, dynamic cache, left padding for a batch. A ratio is
Baton's time over that of `transformers` in one round; the medians over the rounds are printed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from baton import LLM, SamplingParams
from baton.models.loading.config_json import read_config

# Name, prompts at once, tokens per prompt, tokens to generate.
CASES = (
    ("TTFT, 128 tokens, ms", 1, 128, 1),
    ("TTFT, 512 tokens, ms", 1, 512, 1),
    ("TTFT, 2,048 tokens, ms", 1, 2048, 1),
    ("32 tokens, batch 1, ms", 1, 128, 32),
    ("32 tokens, batch 8, ms", 8, 128, 32),
)


def main(
    model: str,
    dtype: str = "bfloat16",
    threads: Annotated[int, typer.Option(help="of both")] = os.cpu_count() or 1,
    rounds: int = 5,
) -> None:
    """Print both times of each case and their ratio."""
    torch.set_num_threads(threads)
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    vocab_size, source = int(read_config(model)["vocab_size"]), random.Random(0)
    with LLM(model, dtype=dtype, max_model_len=4096) as ours:
        for name, at_once, length, num in CASES:
            times: list[tuple[float, float]] = []
            for number in range(rounds + 1):
                prompts = [[source.randrange(3, vocab_size) for _ in range(length)] for _ in range(at_once)]
                started = time.perf_counter()
                ours.generate(prompts, SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True))
                between = time.perf_counter()
                with torch.inference_mode():
                    theirs.generate(
                        torch.tensor(prompts),
                        attention_mask=torch.ones(at_once, length, dtype=torch.int64),
                        max_new_tokens=num,
                        min_new_tokens=num,
                        do_sample=False,
                    )
                if number:
                    times.append((1e3 * (between - started), 1e3 * (time.perf_counter() - between)))
            ratios = sorted(a / b for a, b in times)
            print(
                f"{name:24} Baton {statistics.median(a for a, _ in times):8.1f}  transformers "
                f"{statistics.median(b for _, b in times):8.1f}  ratio {statistics.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} rounds)",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
