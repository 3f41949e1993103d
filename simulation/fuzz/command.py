"""The command lines of the fuzzers, and what they print alike."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence

from simulation.fuzz.strangers import Wave


def parse(module: str, doc: str | None, num: str, processes: int, keys: str) -> argparse.Namespace:
    """Parse the flags of `python -m MODULE`. `num`: the flag for how much is sent; `keys`: the help of `--keys`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").splitlines()[0])
    parser.add_argument(num, type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=processes, help="attacking processes")
    parser.add_argument("--rate", type=float, default=math.inf, help="most frames per second; default: no limit")
    parser.add_argument("--keys", action="store_true", help=keys)
    return parser.parse_args()


def print_sent(sent: Wave, seconds: float) -> None:
    """What the attackers sent, and the connections of each kind."""
    rate = sent.frames / seconds
    print(f"sent       {sent.frames} frames in {sent.connections} connections, {seconds:.0f} s ({rate:.0f}/s)")
    print("kinds      " + ", ".join(f"{count} {kind}" for kind, count in sorted(sent.kinds.items())))


def print_times(what: str, before: Sequence[float], during: Sequence[float]) -> None:
    """A row of quantiles for the times before and during the attack, in seconds, and how many came late."""
    for name, times in (("before", before), ("during", during)):
        if len(times) > 1:
            cuts = [1000 * cut for cut in statistics.quantiles(times, n=100)]
            figures = f"median {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, slowest {max(times) * 1000:.0f} ms"
            print(f"{name:<10} {len(times)} {what}, {figures}")
    if before:
        late = sum(time > 2 * max(before) for time in during)
        print(f"{'late':<10} {late} of {len(during)} took more than twice the slowest before")


def print_faults(faults: Sequence[str]) -> int:
    """A row per fault, at most 20. Returns the exit status."""
    for fault in faults[:20]:
        print(f"FAULT      {fault}")
    return 1 if faults else 0
