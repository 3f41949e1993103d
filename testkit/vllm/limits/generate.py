"""`python -m testkit.vllm.limits.generate ARGUMENTS PROMPTS FILE`: vLLM in this process. All in JSON; the greedy tokens
after each prompt are written into the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(arguments: str, prompts: str, path: str) -> None:
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    found = LLM(**json.loads(arguments)).generate(asked, sampling, use_tqdm=False)
    Path(path).write_text(json.dumps([list(each.outputs[0].token_ids) for each in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
