"""`python -m benchmarks.serving.load_tools --vllm-python PATH`: `baton bench serve` and `vllm bench serve` in turns, on
one server.

PATH is the Python of an environment that has vLLM (`tools/install_vllm.py`). Both send equally many requests of equal
lengths, with equally many in flight. A ratio is vLLM's figure over Baton's of one pair; the spread of a tool's own
figures is its noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from baton.deployment import Deployment
from benchmarks.demo import TARGET

KEYS = (
    *(f"{part}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for part in ("mean", "median", "p99")),
    *("request_throughput", "output_throughput", "total_input_tokens", "total_output_tokens", "completed"),
)

# The command `vllm bench serve` needs the metadata of an installed package; this needs only the modules.
VLLM = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def ask(command: list[str], url: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    flags = {
        "base-url": url,
        "model": Path(options.model).name,
        "tokenizer": options.model,
        "dataset-name": "random",
        "random-input-len": options.input,
        "random-output-len": options.output,
        "num-prompts": options.requests,
        "max-concurrency": options.concurrency,
        "request-rate": options.request_rate,
        "num-warmups": 2,
        "seed": seed,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-filename": "result.json",
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(
            [*command, *words, "--ignore-eos", "--save-result", "--result-dir", folder],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{command[0]} failed: {done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.load_tools")
    parser.add_argument("--vllm-python", required=True, help="of an environment that has vLLM")
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--request-rate", default="inf")
    options = parser.parse_args()
    ours = [sys.executable, "-m", "baton.cli", "bench", "serve"]
    theirs = [options.vllm_python, "-c", VLLM, "--backend", "openai", "--endpoint", "/v1/completions"]
    found: dict[str, list[dict[str, Any]]] = {"baton": [], "vllm": []}
    flags = ["--no-enable-prefix-caching", "--kv-cache-memory", "256M"]
    with Deployment(options.model, 0, 0, 1, engine_flags=flags, router=False) as server:
        for pair in range(options.pairs):
            sides = [("baton", ours), ("vllm", theirs)]
            for name, command in sides if pair % 2 else sides[::-1]:
                found[name].append(ask(command, server.url, options, pair))
    print("| figure | Baton's tool (least to greatest) | vLLM's tool (least to greatest) | vLLM's over Baton's |")
    print("|---|---|---|---|")
    for key in KEYS:
        baton, vllm = ([one[key] for one in found[name]] for name in ("baton", "vllm"))
        ratios = sorted(b / a for a, b in zip(baton, vllm, strict=True))
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {key} | {_spread(baton)} | {_spread(vllm)} | {ratio} |")
    return 0


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
