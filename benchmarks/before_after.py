"""Compare this tree with another commit: TTFT, TPOT, the duration of `baton verify` and figures of `baton bench`,
interleaved.

    python -m benchmarks.before_after COMMIT --launches 6 --pairs 60 --copy-rounds 100 --step-rounds 10

Both trees serve the same checkpoint by `baton up`, with one prefill and one decode engine each, side by side. Each
prompt is sent to both, in a random order, and the tokens must be equal. The servers start afresh for each launch,
since where a process got its memory makes it up to 2% faster or slower for as long as it runs. The output is the
median of the ratios of all pairs with its 95% interval: the bootstrap draws launches, and of each launch its pairs. The
machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from baton.bench.timed_stream import Streamed, stream_completion
from baton.deployment import BATON
from simulation.served import served

ROOT = Path(__file__).parent.parent
TARGET = "models/baton-demo-llama"
SPECULATIVE = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
Measured = TypeVar("Measured")
_WARM_UP = 4
_RESAMPLES = 2000


def interval(launches: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float, float]:
    """Median of the ratios of all `launches` and its 95% interval, by a bootstrap of two levels."""
    rng = random.Random(seed)

    def drawn() -> list[float]:
        return [
            ratio for ratios in rng.choices(launches, k=len(launches)) for ratio in rng.choices(ratios, k=len(ratios))
        ]

    medians = sorted(statistics.median(drawn()) for _ in range(_RESAMPLES))
    overall = statistics.median(ratio for ratios in launches for ratio in ratios)
    return overall, medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A working tree of `commit`, removed at the end."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], check=True, cwd=ROOT)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True, cwd=ROOT)


def environment(tree: Path) -> dict[str, str]:
    """The variables with which `baton` runs the code of `tree`."""
    return {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}


def up(target: str, speculative: dict[str, Any] | None) -> list[str]:
    """The arguments of `baton` for a deployment that hands off every prompt."""
    flags = ["--prefill", "1", "--decode", "1", "--batch-invariant", "--max-local-prefill-length", "0"]
    if speculative:
        flags += ["--speculative-config", json.dumps(speculative)]
    return ["up", target, *flags]


async def ask(
    urls: Sequence[str], pairs: int, prompt: int, output: int, vocabulary: range, seed: int = 0
) -> list[tuple[Streamed, Streamed]]:
    """The answers of both servers to the same prompts. Raises `RuntimeError` if their tokens differ."""
    rng = random.Random(seed)
    answers = []
    async with aiohttp.ClientSession() as session:
        for number in range(_WARM_UP + pairs):
            ids = [rng.choice(vocabulary) for _ in range(prompt)]
            body = {"model": "m", "prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0.0}
            pair: dict[int, Streamed] = {}
            for side in rng.sample((0, 1), 2):
                async with session.get(f"{urls[side]}/v1/models") as reply:
                    body["model"] = (await reply.json())["data"][0]["id"]
                pair[side] = await stream_completion(session, urls[side], body)
            if pair[0].token_ids != pair[1].token_ids:
                raise RuntimeError(f"prompt {number}: the trees answer with other tokens")
            if number >= _WARM_UP:
                answers.append((pair[0], pair[1]))
    return answers


def _ttft_ms(answer: Streamed) -> float:
    return 1000 * answer.ttft_s


def _tpot_ms(answer: Streamed) -> float:
    return 1000 / answer.tokens_per_s


def verify_s(tree: Path, target: str, speculative: dict[str, Any] | None) -> float:
    """Seconds of one `baton verify`. Raises `CalledProcessError` if it finds a difference."""
    flags = ["--speculative-config", json.dumps(speculative)] if speculative else []
    command = [*BATON, "verify", target, "--lengths", "1-48", *flags]
    began = time.monotonic()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tree,
        env={**os.environ, **environment(tree)},
    )
    return time.monotonic() - began


def copies(tree: Path) -> dict[str, float]:
    """Copies over shared memory and planning, by `baton bench transport` in a fresh process."""
    transport = _bench(tree, ["transport", "--kv-transport", "shm", "--size", "1M,16M", "--run-size", "32K"])
    found = {name: value for name, value in transport.items() if name.startswith("plan_") and name.endswith("_ms")}
    for row in transport["copies"]:
        if row["transport"] == "shm":
            found[f"shm {row['nbytes'] >> 20}M"] = row["ms"]
    return found


def step(tree: Path) -> dict[str, float]:
    """The engine's step, by `baton bench engine` in a fresh process."""
    engine = _bench(tree, ["engine", str(ROOT / TARGET)])
    return {name: engine[name] for name in ("step_ms", "step_over_forward")}


def _bench(tree: Path, arguments: Sequence[str]) -> dict[str, Any]:
    command = [*BATON, "bench", *arguments, "--json"]
    env = {**os.environ, **environment(tree)}
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, cwd=tree, env=env).stdout
    )
    return found


def print_row(name: str, unit: str, launches: Sequence[Sequence[tuple[float, float]]]) -> None:
    """One line for `launches` of pairs: the figure before and after."""
    ratio, low, high = interval([[after / before for before, after in pairs] for pairs in launches])
    before, after = (statistics.median(pair[side] for pairs in launches for pair in pairs) for side in (0, 1))
    count = sum(map(len, launches))
    medians = f"{before:8.2f} -> {after:8.2f} {unit}"
    print(f"{name:18} {medians}  ratio {ratio:.3f} ({low:.3f} to {high:.3f}), {count} pairs", flush=True)


def _alternate(
    rounds: int, trees: Sequence[Path], measure: Callable[[Path], Measured]
) -> list[tuple[Measured, Measured]]:
    """What `measure` returned for the two trees, which begin in turns."""
    found = []
    for number in range(rounds):
        pair = {side: measure(trees[side]) for side in ((0, 1) if number % 2 else (1, 0))}
        found.append((pair[0], pair[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--model", help="a checkpoint, without a drafter; default: the demo's with its EAGLE-3 head")
    parser.add_argument("--launches", type=int, default=1, help="how often the servers of both trees start")
    parser.add_argument("--pairs", type=int, default=60, help="prompts of each launch")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--verify-rounds", type=int, default=5)
    parser.add_argument("--copy-rounds", type=int, default=0, help="of `baton bench transport`; 2 seconds each")
    parser.add_argument("--step-rounds", type=int, default=0, help="of `baton bench engine`")
    options = parser.parse_args()
    target = options.model or str(ROOT / TARGET)
    speculative = None if options.model else {**SPECULATIVE, "model": str(ROOT / str(SPECULATIVE["model"]))}
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(checked_out(options.commit)), ROOT]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        answers = []
        for launch in range(options.launches):
            with contextlib.ExitStack() as servers:
                urls = {}
                for side in (0, 1) if launch % 2 else (1, 0):
                    log = directory / f"{launch}.{side}.log"
                    server = served(up(target, speculative), log, trees[side], environment(trees[side]))
                    urls[side] = servers.enter_context(server)[1]
                one = ask([urls[0], urls[1]], options.pairs, options.prompt, options.output, range(10, 250), launch)
                answers.append(asyncio.run(one))
        if options.launches:
            for name, figure in (("TTFT", _ttft_ms), ("TPOT", _tpot_ms)):
                print_row(name, "ms", [[(figure(a), figure(b)) for a, b in pairs] for pairs in answers])
        if times := _alternate(options.verify_rounds, trees, lambda tree: verify_s(tree, target, speculative)):
            print_row("verify", "s ", [times])
        for rounds, measure in ((options.copy_rounds, copies), (options.step_rounds, step)):
            if figures := _alternate(rounds, trees, measure):
                for name in figures[0][0]:
                    print_row(name, "ms", [[(before[name], after[name]) for before, after in figures]])


if __name__ == "__main__":
    main()
