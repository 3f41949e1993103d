"""`python -m benchmarks.topologies.kills`: kill one rank of an engine of two during a handoff, again and again.

Every rank is a process over shared memory. P or D loses one rank by SIGKILL at any moment of a handoff, in both modes.
Then the request must end on the other side within seconds: committed with every byte right, or failed with a named
reason and the ranks. The pages of the intact side are freed, once; those of the side that lost its rank never are. That
engine ends, as real engines do, another takes its place, and the next handoff is right.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from baton.errors import REASONS
from baton.handoff.protocol import events as ev
from baton.handoff.session.config import Timers
from benchmarks.topologies.rank_processes import RemoteEngine
from testkit.handoffs.ranks import NUM_PAGES, SEEDS, Shape, prefill, ticket_for, wanted_of

_LIMIT_S = 20.0
_TOKENS = 60
_TIMERS = Timers(retry=0.5, renew=0.3, lease=2.0, handoff=10.0, close=1.0)
# Slow copies, so that kills occur during them.
_SLOW = "faulty+shm://?fault=delay&delay_s=0.15&every=1"
SHM = Path("/dev/shm")


class Deployment:
    """P and D, replaced after they lost a rank."""

    def __init__(self) -> None:
        self.count = 0
        self.engines = {side: self._new(side) for side in "PD"}
        for engine in self.engines.values():
            engine.begin()

    def _new(self, side: str) -> RemoteEngine:
        self.count += 1
        size = 4 if side == "P" else 5
        shape = Shape(tp=2, page_size=size)
        return RemoteEngine(f"{side}{self.count}", shape, _SLOW, timers=_TIMERS)

    def replace(self, side: str) -> None:
        self.engines[side].end()
        self.engines[side] = self._new(side)
        self.engines[side].begin()

    def end(self) -> None:
        for engine in self.engines.values():
            engine.end()


def hand_over(two: Deployment, mode: str, salt: int, kill: tuple[str, int, float] | None) -> tuple[str, float]:
    """Do one handoff. `kill`: side, rank, and seconds after D was admitted. Returns its outcome and duration. Raises
    `AssertionError` if a check fails.
    """
    p, d = two.engines["P"], two.engines["D"]
    ticket = ticket_for(p, d, mode)  # type: ignore[arg-type]
    source, dest, wanted = p.pages(1, _TOKENS), d.pages(2, _TOKENS), wanted_of(_TOKENS, 3)
    assert max(max(table) for table in (*source.values(), *dest.values())) < NUM_PAGES
    for rank in p.ranks:
        rank.ask("fill", source, _TOKENS, salt)
    for rank in d.ranks:
        rank.ask("clear")
    began = time.monotonic()
    d.together.announce_decode(ticket)
    p.together.open_prefill(ticket)
    due, killed = float("inf"), 0.0
    steps = [
        lambda: prefill(p, ticket, _TOKENS, source),  # type: ignore[arg-type]
        lambda: d.together.open_decode(ticket, _TOKENS, wanted, dest),
    ]
    failed: ev.DecodeFailed | None = None
    ends: dict[str, Any] = {}
    whole = {"P", "D"} - ({kill[0]} if kill else set())
    while not whole <= ends.keys() or (kill and not killed):
        now = time.monotonic()
        assert now < began + _LIMIT_S, f"{mode}, {kill}: {whole - ends.keys()} still wait; {failed}"
        if kill and not killed and now >= due:
            two.engines[kill[0]].ranks[kill[1]].kill()
            killed = time.monotonic()
        if len(steps) == 2:
            steps.pop(0)()
        for side, engine in two.engines.items():
            try:
                event = engine.events.get(timeout=0.002)
            except queue.Empty:
                continue
            if isinstance(event, ev.DecodeAdmitted) and steps:
                due = time.monotonic() + (kill[2] if kill else 0.0)
                steps.pop(0)()
            elif isinstance(event, ev.DecodeFailed):
                assert failed is None, f"told twice: {failed}, {event}"
                assert event.reason in REASONS, event
                assert not event.message.startswith("rank") or " to rank " in event.message, event
                failed = event
            elif isinstance(event, ev.PrefillReleased | ev.DecodeReleased | ev.DecodeCommitted):
                assert side not in ends, f"{side} ended twice: {ends[side]}, {event}"
                ends[side] = event
    took = time.monotonic() - (killed or began)
    end = ends.get("D")
    if isinstance(end, ev.DecodeCommitted):
        assert failed is None, failed
        assert end.seeds == SEEDS, end
        if "D" in whole:
            for rank in d.ranks:
                rank.ask("check", dest, wanted, salt)
        return "committed", took
    if kill is None:
        raise AssertionError(f"without a kill: {ends}, {failed}")
    if kill[0] == "P":
        assert failed is not None, f"D is not told why: {ends}"
        # P's living ranks prove nothing about the dead one.
        assert "P" not in ends or ends["P"].outcome != "committed", ends
        return failed.reason, took
    return f"P: {ends['P'].outcome}", took


def segments() -> set[str]:
    return {path.name for path in SHM.glob("*baton*")} if SHM.is_dir() else set()


def run(kills: int, seed: int) -> list[str]:
    """Returns the faults found."""
    rng, faults, outcomes, slowest = random.Random(seed), list[str](), Counter[str](), 0.0
    before = segments()
    two = Deployment()
    try:
        for number in range(kills):
            mode, side = rng.choice(("push", "pull")), rng.choice("PD")
            kill = side, rng.randrange(2), rng.uniform(0.0, 0.3)
            try:
                end, took = hand_over(two, mode, 2 * number + 1, kill)
                outcomes[f"{side} loses rank {kill[1]}, {mode}: {end}"] += 1
                slowest = max(slowest, took)
                whole = two.engines["D" if side == "P" else "P"]
                two.replace(side)
                until = time.monotonic() + _LIMIT_S
                while left := sum(rank.ask("outstanding") for rank in whole.ranks):
                    assert time.monotonic() < until, f"{left} attempts stay on {whole.name}"
                    time.sleep(0.05)
                assert not whole.together._legs, f"legs stay on {whole.name}"
                assert hand_over(two, mode, 2 * number + 2, None)[0] == "committed"
            except (AssertionError, queue.Empty) as error:
                faults.append(f"kill {number} ({mode}, {kill}): {type(error).__name__} {error}")
                two.end()
                two = Deployment()
    finally:
        two.end()
    if left_behind := segments() - before:
        faults.append(f"shared memory stays: {sorted(left_behind)}")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:>4}  {outcome}")
    print(f"{kills} kills, {len(faults)} faults; slowest end {slowest:.1f} s after the kill")
    return faults


def main() -> int:
    """Returns 0 if all checks passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topologies.kills", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faults = run(arguments.kills, arguments.seed)
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
