"""`python -m tools.gpu_check [--parts PART,...]`: checks that need one CUDA GPU, which CI lacks, in ten minutes.

The transports' conformance over device memory, the kernels, greedy tokens of the engine on the device against those on
the CPU, every architecture with each kind of drafter (`tools.gpu_check.matrix`), whole deployments that hand off from
device memory against one engine, and times. `--parts vllm` (`tools.gpu_check.vllm`) needs a machine with vLLM too.
Prints its results as Markdown, which `benchmarks/results` keeps, and how the time was spent. Exits with 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from baton.testing.conformance import run_suite
from baton.transports.remote.nixl import load_api
from baton.verify.observe import make_cases
from tools.gpu_check import matrix, speed, vllm

DEVICE = "cuda:0"
MODELS = Path(__file__).parents[2] / "models"
LENGTHS = (1, 5, 15, 16, 17, 31, 64, 100)
_BAR = 40


@dataclass(frozen=True)
class Pair:
    """A target of the repository and a drafter for it."""

    target: str
    method: str
    head: str | None = None

    @property
    def spec(self) -> dict[str, Any]:
        head = {"model": str(MODELS / self.head)} if self.head else {}
        return {"method": self.method, "num_speculative_tokens": 3, **head}


PAIRS = (
    Pair("baton-demo-llama", "eagle", "baton-demo-eagle"),
    Pair("baton-demo-llama", "eagle3", "baton-demo-eagle3"),
    Pair("baton-demo-deepseek", "eagle3", "baton-demo-deepseek-eagle3"),
    Pair("baton-demo-deepseek", "mtp"),
)


def conformance() -> bool:
    """Every check of the transport suite, with regions in device memory and the peer in another process."""
    good = True
    for uri in ("cuda_ipc", "nixl"):
        cells, notes = run_suite(uri, DEVICE)
        passed = sum(cell != "FAILED" for cell in cells.values())
        print(f"- `{uri}`: {passed}/{len(cells)} checks" if cells else f"- {notes[0]}")
        for note in notes if cells else []:
            print(f"  - {note}")
        good &= passed == len(cells)
    return good


def kernels() -> bool:
    """The tests in `tests/` that need a device, except the conformance suite."""
    tests = ["tests/kernels/test_device_kernels.py", "tests/engine/attention/test_attention_cuda.py"]
    tests.append("tests/engine/test_cuda.py")
    # The project's own options need plug-ins that these tests do not.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    found = subprocess.run([*command, *tests], capture_output=True, text=True, check=False)
    told = found.stdout.strip().splitlines()[-1] if found.stdout else found.stderr[-200:]
    print(f"- `pytest {' '.join(tests)}`: {told}")
    return found.returncode == 0


def _tokens(pair: Pair, device: str, dtype: str, speculative: bool) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"speculative_config": pair.spec} if speculative else {}
    with LLM(
        str(MODELS / pair.target), device=device, dtype=dtype, kv_cache_memory=1 << 28, batch_invariant=True, **settings
    ) as llm:
        prompts = [list(case.prompt_token_ids) for case in make_cases(llm._engine.tokenizer, LENGTHS, params)]
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def parity() -> bool:
    """Greedy tokens: in float32 equal on device and CPU; in both dtypes equal with and without a drafter."""
    good = True
    for pair in PAIRS:
        on_cpu = _tokens(pair, "cpu", "float32", False)
        counts = []
        for dtype in ("float32", "bfloat16"):
            plain, drafted = (_tokens(pair, DEVICE, dtype, speculative) for speculative in (False, True))
            if dtype == "float32":
                counts.append(("device and CPU", sum(map(list.__eq__, plain, on_cpu))))
            counts.append((f"{dtype}, with a drafter and without", sum(map(list.__eq__, plain, drafted))))
        told = "; ".join(f"{what}: {count}/{len(LENGTHS)}" for what, count in counts)
        print(f"- {pair.target}, {pair.method}: {told}")
        good &= all(count == len(LENGTHS) for _, count in counts)
    return good


def verify() -> bool:
    """`baton verify`: deployments that hand off from device memory against one engine on the device."""
    good = True
    unequal = ["--dtype", "bfloat16", "--prefill-block-size", "8", "--integrity", "full"]
    ipc, nixl = ["--kv-transport", "cuda_ipc"], ["--kv-transport", "nixl"]
    cases = [
        (PAIRS[1], [*ipc, "--dtype", "float32"]),
        (PAIRS[1], [*ipc, *unequal]),
        (PAIRS[2], [*ipc, *unequal]),
        (PAIRS[3], ipc),
    ]
    for pair, flags in [*cases, (PAIRS[1], [*nixl, *unequal])] if has_nixl() else cases:
        command = [sys.executable, "-m", "baton.cli", "verify", str(MODELS / pair.target), "--device", DEVICE, *flags]
        command += ["--kv-cache-memory", "512M", "--modes", "push,pull"]
        command += ["--speculative-config", json.dumps(pair.spec), "--lengths", "1,15,16,17,33,64,200"]
        found = subprocess.run([*command, "--max-tokens", "16"], capture_output=True, text=True, check=False)
        lines = found.stdout.strip().splitlines()
        print(f"- {pair.target}, {pair.method} {' '.join(flags)}: {lines[-1] if lines else found.stderr[-400:]}")
        for line in lines:
            if line.startswith("acceptance"):
                print(f"  - {line}")
        good &= found.returncode == 0
    return good


def has_nixl() -> bool:
    try:
        load_api()
    except ConfigError as error:
        print(f"- nixl: not run: {error}")
        return False
    return True


def whole_matrix(options: argparse.Namespace) -> bool:
    """`tools.gpu_check.matrix`, summed up by target."""
    with tempfile.TemporaryDirectory(prefix="baton-matrix-") as folder:
        root = options.prepared or Path(folder)
        found = matrix.run(DEVICE, root, options.jobs, options.seconds, options.cases, options.targets)
    by_target: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        by_target[one["target"]].append(one)
    for target, rows in by_target.items():
        ran = [row for row in rows if not row.get("left")]
        counts = "; ".join(f"{what} {_sum(ran, key)}" for key, what in _COUNTS.items() if any(key in r for r in ran))
        print(f"- {target}: {len(ran)} of {len(rows)} pairs ran; {counts}")
        for row in ran:
            for failure in row["failures"][:3]:
                print(f"  - {row['drafter']}, {row['dtype']}: {failure}")
    left = sum(bool(one.get("left")) for one in found)
    if left:
        print(f"- {left} pairs were not begun: the time was up")
    return all(matrix.is_good(one) for one in found if not one.get("left"))


_COUNTS = {"handed": "P/D as one engine", "cpu": "device as CPU", "rows": "logprobs alone, in chunks and in batches"}


def _sum(rows: Sequence[dict[str, Any]], key: str) -> str:
    equal, count = (sum(row[key][i] for row in rows if key in row) for i in (0, 1))
    return f"{equal}/{count}"


PARTS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "conformance": lambda options: conformance(),
    "kernels": lambda options: kernels(),
    "parity": lambda options: parity(),
    "verify": lambda options: verify(),
    "matrix": whole_matrix,
    "copies": lambda options: speed.copies(DEVICE),
    "states": lambda options: speed.states(DEVICE),
    "ratios": lambda options: speed.ratios(DEVICE, options.rounds),
    "vllm": lambda options: vllm.check(MODELS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", allow_abbrev=False)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name != "vllm"))
    parser.add_argument("--rounds", type=int, default=6, help="of the ratios")
    parser.add_argument("--prepared", type=Path, help="what `tools.gpu_check.matrix --prepare` made")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 3), help="processes of the matrix")
    parser.add_argument("--targets", nargs="*", default=[], help="of the matrix; default: all")
    parser.add_argument("--seconds", type=float, default=200.0, help="the matrix begins no pair later")
    parser.add_argument("--cases", type=int, default=2, help="requests of a pair by mode and condition, at most 2")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device here")
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    good, taken = True, {}
    for name in options.parts.split(","):
        print(f"\n## {name}\n", flush=True)
        started = time.perf_counter()
        held = PARTS[name](options)
        good &= held
        taken[name] = time.perf_counter() - started
        print(f"\n{'holds' if held else 'FAILS'}, {taken[name]:.0f} s", flush=True)
    print("\n## time\n\n```")
    for name, seconds in taken.items():
        print(f"{name:12} {'#' * round(_BAR * seconds / max(taken.values()))} {seconds:.0f} s")
    print("```")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
