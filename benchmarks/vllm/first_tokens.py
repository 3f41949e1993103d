"""The first tokens of an answer in vLLM on CPUs: `BatonConnector` beside vLLM's own NIXL connectors at their best.

    python -m benchmarks.vllm.first_tokens --vllm-python $(python3 tools/install_vllm.py)/bin/python

Without speculation, then with EAGLE-3: one server and a pair for each connector run together.
Each round sends the same new prompt to all, one at a time in changing order (`benchmarks.vllm.handoffs`), while the
servers of the others are stopped (SIGSTOP). Ratios are taken within rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from baton.vllm.config import FirstStep
from benchmarks.vllm.handoffs import FLAGS, MODEL, PEERS, Deployment, Row, baton_servers, nixl_servers, rounds
from benchmarks.vllm.legs import Single
from benchmarks.vllm.servers import ServerConfig, serve

DRAFTER = "models/baton-demo-eagle3"
TOKENS = {1: "1st", 2: "2nd", 10: "10th"}
# With an executor in the engine's process nothing spins after an answer.
SLEEP_S = 0.3
# By default each server writes zeros into a gigabyte. Half of these blocks are enough for any request.
SMALL = ("--num-gpu-blocks-override", "256")
DRAWS = 2000
Placement = Literal["shared", "engine", "server"]
PLACEMENTS = (
    "shared: all run on all cores; server: the prefill server, and the one vLLM, has a core of its own; "
    "engine: its engine core has one."
)


@contextlib.contextmanager
def deployments(
    python: str, model: str, folder: Path, drafter: str | None, first_steps: Sequence[FirstStep], peers: Sequence[str]
) -> Iterator[tuple[Deployment, list[Deployment]]]:
    """One server and the pairs; with a drafter, one of `BatonConnector` for each of `first_steps`."""
    folder.mkdir(parents=True, exist_ok=True)
    flags: tuple[str, ...] = SMALL
    if drafter is not None:
        method = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
        flags = (*SMALL, "--speculative-config", json.dumps(method))
    started = [
        *(baton_servers(folder, flags, step) for step in (first_steps if drafter is not None else ("recompute",))),
        *(nixl_servers(connector, True, flags) for connector in peers),
    ]
    configs = [ServerConfig("one", (*FLAGS, *flags)), *(config for configs, _ in started for config in configs)]
    with serve(python, model, folder, configs) as (server, *others):
        pairs = zip(others[::2], others[1::2], strict=True)
        found = [each for (_, deploy), (p, d) in zip(started, pairs, strict=True) for each in deploy(p, d)]
        yield Deployment("one vLLM", Single(server.url), (server,)), found


def place(placement: Placement, found: Sequence[Deployment], cores: Set[int]) -> None:
    own = set() if placement == "shared" else {max(cores)}
    rest = cores - own
    os.sched_setaffinity(0, rest)
    for deployment in found:
        first, *others = deployment.servers
        first.bind(own or rest, own if placement == "server" else rest)
        for server in others:
            server.bind(rest, rest)


def times_of(row: Row) -> dict[int, list[float]]:
    """Milliseconds to each of `TOKENS`, one per round; nan if there was no answer."""
    found: dict[int, list[float]] = {}
    for token in TOKENS:
        found[token] = [first + sum(gaps[: token - 1]) for first, gaps in zip(row.ttft, row.gaps, strict=True)]
    return found


def interval(values: Sequence[float]) -> str:
    """The median with its 95% interval by bootstrap; nan is left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    rng = random.Random(0)
    draws = sorted(statistics.median(rng.choices(known, k=len(known))) for _ in range(DRAWS))
    low, high = draws[DRAWS // 40], draws[-DRAWS // 40 - 1]
    return f"{statistics.median(known):.2f} ({low:.2f} to {high:.2f})"


def over(values: Sequence[float], reference: Sequence[float]) -> str:
    return interval([a / b for a, b in zip(values, reference, strict=True)])


def table(rows: dict[str, Row], one: str, peer: str) -> list[str]:
    """Markdown. "2nd gap": from the first to the second token, over the same answer's TPOT."""
    head = ["deployment", *(f"{name} ms" for name in TOKENS.values()), "1st over one", "2nd gap", "TPOT over one"]
    if peer in rows:
        head += [f"{name} over {peer.partition(' ')[0]}" for name in TOKENS.values()]
    lines = [f"| {' | '.join([*head, ''])} |", "|---" * (len(head) + 1) + "|"]
    base, other = rows[one], times_of(rows[peer]) if peer in rows else {}
    for name, row in rows.items():
        times = times_of(row)
        gaps = [second - first for first, second in zip(times[1], times[2], strict=True)]
        cells = [name, *(_median(times[token]) for token in TOKENS)]
        cells += [over(row.ttft, base.ttft), over(gaps, row.tpot), over(row.tpot, base.tpot)]
        cells += [over(times[token], other[token]) for token in TOKENS if other]
        notes = {"other answers": row.num_other, "failed": row.num_failed}
        cells.append(", ".join(f"{count} {note}" for note, count in notes.items() if count))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _median(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.1f}" if known else "-"


def first_tokens_command(
    vllm_python: Annotated[str, typer.Option(help="An interpreter that has vLLM.")] = sys.executable,
    model: Annotated[str, typer.Option(help="Checkpoint directory.")] = MODEL,
    drafter: Annotated[str, typer.Option(help="Its EAGLE-3 drafter; empty: without speculation only.")] = DRAFTER,
    plain: Annotated[bool, typer.Option(help="Without speculation too.")] = True,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,2000",
    num_rounds: Annotated[int, typer.Option(help="Rounds for each length.")] = 14,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    first_steps: Annotated[str, typer.Option(help="Values of first_step, with the drafter.")] = "verify",
    peers: Annotated[str, typer.Option(help="vLLM's own connectors to measure too.")] = ",".join(PEERS),
    placements: Annotated[str, typer.Option(help=PLACEMENTS)] = "shared",
    in_turns: Annotated[bool, typer.Option(help="One of `--peers` after the other: 5 servers at a time.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write every time that was taken here.")] = None,
) -> None:
    """Times of the first, second and tenth token, and the gap to the second over TPOT."""
    names = [name for name in peers.split(",") if name]
    steps = [step for step in get_args(FirstStep) if step in first_steps.split(",")]
    places = [each for each in get_args(Placement) if each in placements.split(",")]
    cores = os.sched_getaffinity(0)
    beside = [[name] for name in names] if in_turns else [names]
    results: dict[str, Any] = {}
    for method, connectors in itertools.product(([None] if plain else []) + ([drafter] if drafter else []), beside):
        peer = f"{connectors[0]} at its best" if connectors else ""
        label = ", ".join(["EAGLE-3" if method else "no speculation", *(connectors if in_turns else [])])
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
            folder = (log_dir or Path(scratch)) / label.replace(", ", "-").replace(" ", "-")
            with deployments(vllm_python, model, folder, method, steps, connectors) as (one, pairs):
                for length, placement in itertools.product((int(each) for each in lengths.split(",")), places):
                    place(placement, [one, *pairs], cores)
                    rows = asyncio.run(rounds(one, pairs, length, num_rounds, max_tokens, True, SLEEP_S))
                    results[f"{label}, {length}, {placement}"] = {name: asdict(row) for name, row in rows.items()}
                    print(f"\n{label}, {length} tokens, {num_rounds} rounds, {max_tokens} tokens each, {placement}:")
                    print("\n".join(table(rows, one.name, peer)), flush=True)
                    if json_output is not None:
                        json_output.write_text(json.dumps(results))


if __name__ == "__main__":
    typer.run(first_tokens_command)
