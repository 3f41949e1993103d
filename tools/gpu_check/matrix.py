"""Every architecture with each kind of drafter, from small random checkpoints, in a process per target.

Of each pair: one engine on the device against one on a CPU, float32 (greedy and with noise); rows alone and in chunks
against the rows of a whole prompt, to the bit; and P/D on the device with pages of unequal sizes and digests of all
bytes, pushed and pulled, against one engine: tokens, logprobs and accepted drafts.

The checkpoints and a CPU's tokens are made once, in a folder that can be carried to the machine with the GPU:
`python -m tools.gpu_check.matrix --prepare DIR`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from baton.engine.config import KVTransferConfig, SpeculativeConfig
from baton.sampling_params import SamplingParams
from benchmarks.parity.cases import MAX_MODEL_LEN, Case, cases
from benchmarks.parity.models import DRAFTERS, NUM_DRAFTS, TARGETS, THREE_MODULES, tiny
from benchmarks.parity.trial import Trial, compare
from testkit.engines import Stepped, Stream, request, stepped

CHECKPOINTS: Mapping[str, Callable[[Path, int], Path]] = {
    **{name: make for name, make in TARGETS.items() if name != "latents, window and states"},
    "mixtral": tiny("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "phi3": tiny("phi3"),
}
# With every target; the other drafters with a llama alone.
_USUAL = ("none", "eagle", "eagle3, d2t", "mtp", "mtp, three modules", "ngram", "draft_model", "assistant")
_KV_BYTES = 64 << 20
_ROWS = 70
_SIZES = "per group"
# Latents and indexers are PyTorch operations on a GPU, request by request.
_SLOW = ("deepseek_v32", "glm_moe_dsa", "deepseek", "llama")
_PIECES = 3
_COUNTED = ("handed", "cpu", "rows")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a pair. `spec`: its `--speculative-config`, with folders relative to it."""

    folder: Path
    target: str
    drafter: str

    @property
    def model(self) -> Path:
        return self.folder / "target"

    def spec(self) -> SpeculativeConfig | None:
        file = self.folder / f"{slug(self.drafter)}.json"
        if not file.exists():
            return None
        raw = json.loads(file.read_text())
        model = {"model": str(self.folder / raw["model"])} if "model" in raw else {}
        return SpeculativeConfig.parse({"num_speculative_tokens": NUM_DRAFTS, **raw, **model})


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name)


def drafters_of(target: str) -> list[str]:
    fits = [name for name in DRAFTERS if DRAFTERS[name].needs(target) is None]
    if target == THREE_MODULES:
        return [name for name in fits if name.startswith("mtp") or name == "none"]
    return fits if target == "llama" else [name for name in fits if name in _USUAL]


def prepare(root: Path, target: str) -> None:
    """Make the checkpoints of a target and its drafters in `root`, and a CPU's tokens. Does nothing if they exist."""
    folder = root / slug(target)
    if (folder / "tokens.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = CHECKPOINTS[target](folder / "target", 0)
    for drafter in drafters_of(target):
        make = DRAFTERS[drafter].make
        if make is not None:
            raw = make(folder / slug(drafter), model, 1)
            if "model" in raw:
                raw["model"] = Path(raw["model"]).name
            (folder / f"{slug(drafter)}.json").write_text(json.dumps(raw))
    batch = cases(0, 2)
    streams = Prepared(Place(folder, target, "none"), "cpu", "float32").alone(batch)
    (folder / "tokens.json").write_text(json.dumps([streams[case].token_ids for case in batch]))


class Prepared(Trial):
    """A pair whose checkpoints exist, on a device."""

    def __init__(self, place: Place, device: str, dtype: str) -> None:
        self.folder, self.prepare = Path(tempfile.mkdtemp(prefix="baton-matrix-")), DRAFTERS[place.drafter].prepare
        transport = "local://" if device == "cpu" else "cuda_ipc://"
        self.settings: dict[str, Any] = {
            "model": str(place.model),
            "speculative_config": place.spec(),
            "skip_tokenizer_init": True,
            "device": device,
            "dtype": dtype,
            "batch_invariant": True,
            "integrity": "full",
            "kv_transfer_config": KVTransferConfig(kv_transport=transport),
            "kv_cache_memory": _KV_BYTES,
            "max_model_len": MAX_MODEL_LEN,
            **DRAFTERS[place.drafter].settings,
        }


def check_pair(place: Place, device: str, dtype: str, num_cases: int) -> dict[str, Any]:
    """The counts of a pair's checks, each as [equal, all], and what differed."""
    trial, batch = Prepared(place, device, dtype), cases(0, num_cases)
    found: dict[str, Any] = {"target": place.target, "drafter": place.drafter, "dtype": dtype, "failures": []}
    alone = trial.alone(batch)
    if place.drafter == "none" and dtype == "float32":
        known = json.loads((place.folder / "tokens.json").read_text())
        by_name = dict(zip(cases(0, 2), known, strict=True))
        same = [by_name[case] == alone[case].token_ids for case in batch if case in by_name]
        found["cpu"] = [sum(same), len(same)]
    if place.drafter == "none":
        found["rows"] = rows_are_alike(trial)
    found["bytes"], count = 0, [0, 0]
    with trial.pair(_SIZES) as two:
        for chunked, mode in dict.fromkeys((case.chunked, case.mode) for case in batch):
            some = {case: alone[case] for case in batch if (case.chunked, case.mode) == (chunked, mode)}
            cell = compare(two, some)
            count = [count[0] + cell.num_identical, count[1] + cell.num_cases]
            found["bytes"] += cell.num_bytes
            found["failures"] += [failure[:300] for failure in cell.failures]
    found["handed"] = count
    shutil.rmtree(trial.folder, ignore_errors=True)
    return found


def rows_are_alike(trial: Trial) -> list[int]:
    """How many of a prompt's logprobs are equal to the bit, whether it is computed at once, in pieces of 17 rows, or
    beside three others."""
    prompt = Case("whole", "push", _ROWS, 1, 0).prompt
    with stepped(**{**trial.settings, "speculative_config": None, "enable_prefix_caching": False}) as one:
        whole = _scored(one, "whole", [prompt])
        scheduler = one.core.scheduler
        beside = _scored(one, "beside", [[3, 4, 5], prompt, [9] * 40])
        budget, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, 17
        pieces = _scored(one, "pieces", [prompt])
        scheduler.max_num_batched_tokens = 1
        single = _scored(one, "single", [prompt])
        scheduler.max_num_batched_tokens = budget
    return [sum(a == b == c == d for a, b, c, d in zip(whole, beside, pieces, single, strict=True)), len(whole)]


def _scored(engine: Stepped, name: str, prompts: Sequence[list[int]]) -> list[Any]:
    """The logprobs of the longest prompt's tokens."""
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    streams = [engine.add(request(f"{name}-{i}", prompt, params)) for i, prompt in enumerate(prompts)]
    while not all(stream.ended for stream in streams):
        engine.step()
    longest = streams[max(range(len(prompts)), key=lambda i: len(prompts[i]))]
    return [*_prompt_logprobs(longest)[1:], *longest.logprobs]


def _prompt_logprobs(stream: Stream) -> list[Any]:
    return next(chunk.prompt_logprobs for chunk in stream.chunks if chunk.prompt_logprobs is not None)


def work(targets: Sequence[str], root: Path, options: argparse.Namespace) -> None:
    """Check all pairs of some targets, and print a line of JSON about each."""
    deadline = time.monotonic() + options.seconds
    for target in targets:
        prepare(root, target)
        part, parts = (int(each) for each in options.part.split("/"))
        for number, drafter in list(enumerate(drafters_of(target)))[part::parts]:
            for dtype in ("float32", "bfloat16") if drafter == "none" else (("float32", "bfloat16")[number % 2],):
                began = time.monotonic()
                if began > deadline:
                    print(json.dumps({"target": target, "drafter": drafter, "dtype": dtype, "left": True}), flush=True)
                    continue
                place = Place(root / slug(target), target, drafter)
                try:
                    found = check_pair(place, options.device, dtype, options.cases)
                except Exception as error:
                    found = {"target": target, "drafter": drafter, "dtype": dtype, "failures": [told(error)]}
                print(json.dumps({**found, "seconds": round(time.monotonic() - began, 1)}), flush=True)


def told(error: BaseException) -> str:
    """An error with the two innermost places of Baton's code."""
    places, trace = [], error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "/baton/" in name or "/testkit/" in name:
            places.append(f"{Path(name).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:300]} at {', '.join(places[-3:])}"


def run(
    device: str, root: Path, jobs: int, seconds: float, num_cases: int, targets: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Check all pairs, or those of `targets`, in `jobs` processes at a time, the slowest targets first. Returns what
    each found."""
    deadline = time.monotonic() + seconds
    order = sorted(
        targets or CHECKPOINTS, key=lambda name: next((i for i, slow in enumerate(_SLOW) if slow in name), len(_SLOW))
    )
    pieces = [(name, f"{i}/{_PIECES}") for name in order for i in range(_PIECES)]

    def one(piece: tuple[str, str]) -> list[dict[str, Any]]:
        target, part = piece
        command = [sys.executable, "-m", "tools.gpu_check.matrix", target, "--part", part, "--root", str(root)]
        command += ["--device", device, "--cases", str(num_cases)]
        command += ["--seconds", str(deadline - time.monotonic())]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        if ended.returncode:
            failure = f"exit status {ended.returncode}: {ended.stderr.strip()[-400:]}"
            lines.append({"target": target, "drafter": part, "dtype": "", "failures": [failure]})
        return lines

    for target in order:
        prepare(root, target)
    with ThreadPoolExecutor(jobs) as pool:
        return [found for lines in pool.map(one, pieces) for found in lines]


def is_good(found: Mapping[str, Any]) -> bool:
    """Whether nothing differed."""
    return not found["failures"] and all(found[key][0] == found[key][1] for key in _COUNTED if key in found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.matrix", allow_abbrev=False)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--prepare", type=Path, help="make checkpoints and a CPU's tokens in this folder, and stop")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=600.0, help="no pair is begun later")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth drafter of a target, from the Ith on")
    parser.add_argument("--cases", type=int, default=2, help="requests of each mode and condition, at most 2")
    options = parser.parse_args()
    targets = options.targets or list(CHECKPOINTS)
    if options.prepare is not None:
        for target in targets:
            prepare(options.prepare, target)
        return
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", OMP_NUM_THREADS="1"):
        work(targets, options.root or Path(folder), options)


if __name__ == "__main__":
    main()
