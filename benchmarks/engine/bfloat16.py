"""Greedy tokens in bfloat16 against those of `transformers`, as Markdown.

    python -m benchmarks.engine.bfloat16 [TARGET]

The two round in different places, so the outputs of random models diverge sooner or later. `transformers` in float32
over the same rounded weights judges both. An answer is a *near-tie* if each of its tokens is as close to the judge's
best as twice the error of the bfloat16 logits of `transformers` along the same tokens (both may be off).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.sampling_params import SamplingParams
from benchmarks.parity.models import TARGETS
from testkit.engines import stepped

LENGTHS = (1, 2, 5, 9, 17, 33, 41, 64, 100, 120)
NEW_TOKENS = 24
_GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
# `transformers` does not have them, or they are like another target.
_WITHOUT = ("latents, window and states", "deepseek_v3, three modules")


def logits_of(model: Any, tokens: list[int], prompt_len: int) -> torch.Tensor:
    """Float32 [generated, vocabulary]: the logits from which each generated token was chosen."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0, prompt_len - 1 : -1].float()
    return found


def compare(path: Path) -> tuple[int, int, int, float]:
    """Returns the numbers of equal answers, near-ties and others, and the largest distance below the judge's best as a
    share of the near-tie limit.
    """
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    judge: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    judge.float()
    theirs.generation_config.eos_token_id = theirs.config.eos_token_id = None
    equal = ties = others = 0
    furthest = 0.0
    with stepped(model=str(path), speculative_config=None, dtype="bfloat16", skip_tokenizer_init=True) as one:
        for length in LENGTHS:
            prompt = [3 + (7 * i + i * i) % 200 for i in range(length)]
            got, ids = one.run(str(length), prompt, _GREEDY).token_ids, torch.tensor([prompt])
            with torch.inference_mode():
                out = theirs.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                    pad_token_id=0,
                )
            if out[0, length:].tolist() == got:
                equal += 1
                continue
            exact = logits_of(judge, prompt + got, length)
            off = float((logits_of(theirs, prompt + got, length) - exact).abs().max())
            below = float((exact.amax(-1) - exact.gather(1, torch.tensor(got)[:, None])[:, 0]).max())
            furthest = max(furthest, below / (2 * off))
            ties, others = (ties + 1, others) if below <= 2 * off else (ties, others + 1)
    return equal, ties, others, furthest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compared = [name for name in TARGETS if name not in _WITHOUT]
    parser.add_argument(
        "target", nargs="?", choices=compared, metavar="TARGET", help=f"default: all. {'; '.join(compared)}"
    )
    only = parser.parse_args().target
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print("| target | equal | near-ties | others | furthest, of what makes a near-tie |")
    print("| --- | --- | --- | --- | --- |")
    for name in [only] if only else compared:
        with tempfile.TemporaryDirectory() as folder:
            equal, ties, others, furthest = compare(TARGETS[name](Path(folder) / "target", 0))
        print(f"| {name} | {equal} | {ties} | {others} | {furthest:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
