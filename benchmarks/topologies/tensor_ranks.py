"""`python -m benchmarks.topologies.tensor_ranks`: P with 1, 2 and 4 tensor ranks hands over to D with 1, 2 and 4.

The same comparison as `benchmarks.topologies`, with one engine for each side and number of ranks, which takes a third
of its processes. Each pair of engines gets requests of its own, with pages of 16 tokens on P and of 7 on D. With
`--cases 0` the pairs share the requests of all lengths. Exit code 1 if a request is not identical to one engine of one
rank.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from baton.engine.config import KVTransferConfig
from baton.handoff.protocol.ticket import load_or_create_key
from benchmarks.parity.cases import Case, block_sizes, cases
from benchmarks.topologies.__main__ import MODELS, compared, trial_of
from testkit.engines import Pair, stepped
from testkit.processes import baton_forks

_RANKS = (1, 2, 4)
_SIZES = "16/7"


def requests(seed: int, most: int) -> dict[tuple[int, int], list[Case]]:
    """By the ranks of P and of D. No two share a prompt, since the engines keep what they have computed."""
    pairs = [(p, d) for p in _RANKS for d in _RANKS]
    found: dict[tuple[int, int], list[Case]] = {}
    if not most:
        every = cases(seed, 0)
        return {pair: every[number :: len(pairs)] for number, pair in enumerate(pairs)}
    first = 0
    for number, pair in enumerate(pairs):
        drawn = cases(seed * len(pairs) + number, most)
        found[pair] = [replace(case, number=first + case.number) for case in drawn]
        first += len(drawn)
    return found


def rows(name: str, seed: int, most: int, dtype: str, failures: list[str]) -> Iterator[str]:
    """A line for each pair of engines."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        model, key_file = trial_of(name, Path(folder), seed, dtype), f"{folder}/ticket.key"
        alone = {pair: model.alone(batch) for pair, batch in requests(seed, most).items()}
        common = {
            **model.settings,
            "ticket_key_file": key_file,
            "kv_transfer_config": KVTransferConfig(kv_transport="shm://"),
        }
        p_size, d_size = block_sizes(_SIZES, ())
        made = {
            (role, ranks): engines.enter_context(
                stepped(role=role, engine_id=f"{role}-{ranks}", tensor_parallel_size=ranks, block_size=size, **common)
            )
            for role, size in (("prefill", p_size), ("decode", d_size))
            for ranks in _RANKS
        }
        for engine in made.values():
            model.prepare(engine)
        for (p, d), said in alone.items():
            two = Pair(made["prefill", p], made["decode", d], load_or_create_key(key_file))
            began = time.monotonic()
            cell = compared(two, said)
            failures += [f"{name}, {dtype}, TP {p} to TP {d}: {failure}" for failure in cell.failures]
            identical = f"{cell.num_identical}/{cell.num_cases}"
            yield f"| {name} | {dtype} | TP {p} to TP {d} | {identical} | {cell.num_bytes:,} | {cell.wanted_bytes:,} |"
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topologies.tensor_ranks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="", help=f"models whose name contains this: {'; '.join(MODELS)}")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and noise")
    parser.add_argument("--cases", type=int, default=1, help="requests of each mode and condition; 0: all lengths")
    parser.add_argument("--dtype", default="float32", help="of weights and KV")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failures: list[str] = []
    print("| model | dtype | P to D | identical | bytes sent | least |\n|---|---|---|---|---|---|", flush=True)
    with contextlib.closing(baton_forks.launcher()) as launcher, baton_forks.forking(launcher):
        for name in MODELS:
            if options.model in name:
                for line in rows(name, options.seed, options.cases, options.dtype, failures):
                    print(line, flush=True)
    print("\n".join(failures[:20]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
