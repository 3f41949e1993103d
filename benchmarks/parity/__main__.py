"""`python -m benchmarks.parity`: print the parity matrix. Exit code 1 if a cell is not identical."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from baton.engine.config import DTYPES
from benchmarks.parity.cases import CONDITIONS, cases
from benchmarks.parity.models import DRAFTERS, TARGETS
from benchmarks.parity.report import Report
from benchmarks.parity.trial import run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--only", default="", help="TARGET/DRAFTER: pairs whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and noise")
    parser.add_argument("--cases", type=int, help="requests of each mode and condition (default: all lengths)")
    parser.add_argument("--condition", choices=CONDITIONS, help="requests of this condition only")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of weights and KV (default: float32)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, report = time.process_time(), Report()
    batch = cases(options.seed, options.cases, options.condition)
    for target in TARGETS:
        for drafter, entry in DRAFTERS.items():
            if options.only not in f"{target}/{drafter}":
                continue
            reason = entry.needs(target)
            if reason is not None:
                report.leave_out(target, drafter, reason)
                continue
            with tempfile.TemporaryDirectory() as folder:
                report.add(target, drafter, run(target, drafter, Path(folder), batch, dtype=options.dtype))
            print(f"{target}/{drafter}: {time.process_time() - began:.0f} s", file=sys.stderr, flush=True)
    if not report.rows:
        parser.error(f"no pair is called {options.only!r}")
    print(report.text())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
