"""The results of `benchmarks.faults.chaos`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.wire import Recovery

RUNGS = (("engine", "retry"), ("router", "retry"), ("router", "source"), ("engine", "recompute"), ("router", "full"))


@dataclass(slots=True)
class ChaosReport:
    """`faults` by role and kind, `recoveries` by (who, rung), `leaks`: what was left behind. `in_handoff`: engines that
    lost a rank while handoffs were open. `reasons`: of handoffs that failed on D. `refusals`: errors that a server
    reported, by reason; `errors`: streams that were cut. `beside`: streams of other routers than the killed one.
    """

    recovery: Recovery = "full"
    num_requests: int = 0
    num_exact: int = 0
    different: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    recoveries: Counter[tuple[str, str]] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    in_handoff: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    rejoined_s: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    elapsed_s: float = 0.0
    num_orphans: int = 0
    orphans_freed_s: float = 0.0
    num_exact_after: int = 0
    num_after: int = 0
    num_exact_beside: int = 0
    num_beside: int = 0

    @property
    def ok(self) -> bool:
        """Whether every stream was exact (or failed with a reason, if recovery is limited), and nothing was left
        behind.
        """
        failed = 0 if self.recovery == "full" else self.refusals.total()
        as_told = self.num_exact + failed == self.num_requests
        exact = self.num_exact_after == self.num_after and self.num_exact_beside == self.num_beside
        return as_told and exact and not self.leaks

    def table(self) -> str:
        rows = [("requests", f"{self.num_requests} in {self.elapsed_s:.0f} s, slowest {self.slowest_s:.1f} s")]
        rows += [(f"fault: {role}, {kind}", str(count)) for (role, kind), count in sorted(self.faults.items())]
        rows.append(("outcome: exact", f"{self.num_exact}/{self.num_requests}"))
        rows += [(f"outcome: failed, {reason}", str(count)) for reason, count in sorted(self.refusals.items())]
        rows += [(f"outcome: CUT, {name}", str(count)) for name, count in sorted(self.errors.items())]
        rows += [("outcome: DIFFERENT", text) for text in self.different]
        rows += [(f"recovery: {who}, {rung}", str(self.recoveries[who, rung])) for who, rung in RUNGS]
        rows += [(f"handoffs failed: {reason}", str(count)) for reason, count in sorted(self.reasons.items())]
        slowest = max(self.rejoined_s, default=0.0)
        rows.append(("restarted engines rejoined", f"{len(self.rejoined_s)}, slowest {slowest:.1f} s after its start"))
        if self.ended_s:
            lost = f"{len(self.ended_s)}, {self.in_handoff} with handoffs open, ended within {max(self.ended_s):.1f} s"
            rows.append(("engines that lost a rank", lost))
        rows.append(("router killed", f"{self.num_orphans} streams cut, freed in {self.orphans_freed_s:.1f} s"))
        if self.num_beside:
            rows.append(("other routers meanwhile: exact", f"{self.num_exact_beside}/{self.num_beside}"))
        rows.append(("new router: exact", f"{self.num_exact_after}/{self.num_after}"))
        rows.append(("left behind", "; ".join(self.leaks) or "nothing"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
