"""Acceptance of the first verification and of the later ones, by route and engine pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.histogram import Histogram

HANDED_OFF = "handed_off"
_DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_MAX_POSITIONS = 32


@dataclass(frozen=True, slots=True)
class Group:
    """Requests with one route. `prefill` is empty unless they were handed off."""

    route: str
    prefill: str
    decode: str

    @property
    def handed_off(self) -> bool:
        return self.route == HANDED_OFF

    def describe(self) -> str:
        where = f"{self.prefill} to {self.decode}" if self.prefill else self.decode
        return f"{self.route.replace('_', ' ')}, {where}"


@dataclass(frozen=True, slots=True)
class RequestAcceptance:
    """One request: per verification the number of drafts and of accepted ones. After a handoff the first is of prefill
    drafts. `prompt`: a hash, if known."""

    group: Group
    accepted: Sequence[int]
    drafted: Sequence[int]
    prompt: int | None = None

    @property
    def first(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.accepted[:1], self.drafted[:1]

    @property
    def later(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.accepted[1:], self.drafted[1:]


@dataclass(slots=True)
class PartTotals:
    """Totals over verifications. `accepted_at`, `drafted_at`: by draft position."""

    num_verifications: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    histogram: Histogram = field(default_factory=lambda: Histogram(_DRAFTS))

    def add(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        for num_accepted, num_drafted in zip(accepted, drafted, strict=False):
            self.num_verifications += 1
            self.num_accepted += num_accepted
            self.num_drafted += num_drafted
            self.histogram.observe(num_accepted)
            for counts, number in ((self.accepted_at, num_accepted), (self.drafted_at, num_drafted)):
                number = min(number, _MAX_POSITIONS)
                counts.extend([0] * (number - len(counts)))
                for position in range(number):
                    counts[position] += 1

    def describe(self) -> dict[str, object]:
        filled = [*self.accepted_at, *([0] * (len(self.drafted_at) - len(self.accepted_at)))]
        return {
            "num_verifications": self.num_verifications,
            "acceptance": self.num_accepted / self.num_drafted if self.num_drafted else None,
            "acceptance_per_pos": [a / d for a, d in zip(filled, self.drafted_at, strict=False)],
        }


@dataclass(slots=True)
class GroupTotals:
    """Totals over the requests of one group."""

    num_requests: int = 0
    first: PartTotals = field(default_factory=PartTotals)
    later: PartTotals = field(default_factory=PartTotals)

    def add(self, request: RequestAcceptance) -> None:
        self.num_requests += 1
        self.first.add(*request.first)
        self.later.add(*request.later)


class AcceptanceTotals:
    """Totals by group. The least recently used is evicted for a new one."""

    def __init__(self, max_groups: int = 256) -> None:
        self._max_groups = max_groups
        self._groups: dict[Group, GroupTotals] = {}

    def observe(self, request: RequestAcceptance) -> None:
        """The request had at least one verification with drafts."""
        totals = self._groups.pop(request.group, None) or GroupTotals()
        self._groups[request.group] = totals
        totals.add(request)
        if len(self._groups) > self._max_groups:
            del self._groups[next(iter(self._groups))]

    def __iter__(self) -> Iterator[tuple[Group, GroupTotals]]:
        return iter(sorted(self._groups.items(), key=lambda item: (item[0].route, item[0].prefill, item[0].decode)))

    def describe(self) -> list[dict[str, object]]:
        return [
            {
                "route": group.route,
                "prefill": group.prefill or None,
                "decode": group.decode,
                "num_requests": totals.num_requests,
                "first_verification": totals.first.describe(),
                "later_verifications": totals.later.describe(),
            }
            for group, totals in self
        ]
