"""Statistics over many seeds as text, and the relevant part of a failing seed's trace."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from simulation.scenario import Result

_ID = re.compile(r"\b[0-9a-f]{32}/\d+")
# Events of processes and connections, rather than of one attempt.
_CONTEXT = re.compile(r"VIOLATION|is dead|is paused|goes on|leaves|closed|reach each other|HELLO|BYE|faults end")
_SHORT_LINES = 70


@dataclass(slots=True)
class Summary:
    """Totals over seeds. `failures` are `(seed, violation)` of seeds that broke an invariant."""

    seeds: int = 0
    events: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.events += result.events
        self.injected.update(result.injected)
        self.outcomes.update(result.outcomes)
        self.rungs.update(result.rungs)
        if result.violation is not None:
            self.failures.append((result.seed, str(result.violation)))

    def merge(self, other: Summary) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.injected.update(other.injected)
        self.outcomes.update(other.outcomes)
        self.rungs.update(other.rungs)
        self.failures = sorted(self.failures + other.failures)

    def text(self, seconds: float) -> str:
        """The totals as text, one block per kind."""
        lines = [
            f"{self.seeds:,} seeds, {self.events:,} events in {seconds:.0f} s: {len(self.failures)} violations",
            *_table("faults injected", self.injected),
            *_table("requests by outcome", self.outcomes),
            *_table("recoveries by rung", self.rungs),
        ]
        return "\n".join(lines)


def _table(title: str, counts: Counter[str]) -> list[str]:
    lines = [f"{title}: {sum(counts.values()):,}"]
    return lines + [f"  {name:<36}{count:>10,}" for name, count in counts.most_common() if count]


def shortened(result: Result) -> str:
    """The end of a failing trace: lines of the violation's attempts, and events of processes."""
    named = {label[:6] + label[32:] for label in _ID.findall(str(result.violation))}
    named |= set(_ID.findall(str(result.violation)))
    kept, runs = [], 0
    for line in result.trace:
        mine = any(label in line for label in named)
        if mine and (" reads " in line or " writes " in line):
            runs += 1
            if runs > 3:
                continue
        else:
            runs = 0
        if mine or _CONTEXT.search(line) or not named:
            kept.append(line if len(line) <= 200 else line[:199] + "…")
    return "\n".join([*result.trace[:1], f"... ({len(result.trace)} lines in all)", *kept[-_SHORT_LINES:]])
