"""Alarms on acceptance: which engine's drafts are accepted less often than they should be, by more than chance.

Four figures of each request are compared: of the first verification and of the later ones, how often the first draft
is accepted, and the share of accepted drafts. Each is compared with the same figure of requests that one engine
computed (`local`), with that of requests on other decode engines (`other_engines`), and with the request's own other
verifications (`itself`), which shows a fault even with one engine pair and no local request.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.observe.acceptance import Group, RequestAcceptance
from baton.observe.detector import DropDetector

logger = logging.getLogger(__name__)

Part = Literal["first_verification", "later_verifications"]
Reference = Literal["local", "other_engines", "itself"]
# Prompts and positions differ: a smaller difference is no alarm.
MARGIN = 0.1
OWN_MARGIN = 0.3
_KEPT = 1024
_SHOWN = 100
_MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class _Figures:
    """Of one request's verifications: the share whose first draft was accepted, and the share of accepted drafts."""

    first_draft: float
    all_drafts: float

    @classmethod
    def of(cls, accepted: Sequence[int], drafted: Sequence[int]) -> _Figures | None:
        """None without drafts."""
        pairs = [(a, d) for a, d in zip(accepted, drafted, strict=False) if d]
        if not pairs:
            return None
        return cls(sum(a > 0 for a, _ in pairs) / len(pairs), sum(a for a, _ in pairs) / sum(d for _, d in pairs))

    def both(self) -> tuple[float, float]:
        return self.first_draft, self.all_drafts


@dataclass(frozen=True, slots=True)
class _Sample:
    group: Group
    parts: dict[Part, _Figures | None]


@dataclass(slots=True)
class _Comparison:
    """The detectors of one part of a group's requests against one reference. `next`: the number of the first sample
    not yet used as a reference: pairs must be independent."""

    part: Part
    reference: Reference
    detectors: tuple[DropDetector, DropDetector]
    next: int = 0
    last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_SHOWN))

    def observe(self, observed: _Figures, reference: _Figures) -> bool:
        """Returns whether an alarm has begun or ended."""
        before = self.alarmed
        self.last.append((observed.first_draft, reference.first_draft))
        for detector, mine, other in zip(self.detectors, observed.both(), reference.both(), strict=True):
            detector.observe(mine, other)
        return self.alarmed != before

    @property
    def alarmed(self) -> bool:
        return any(detector.alarmed for detector in self.detectors)

    @property
    def num_pairs(self) -> int:
        return self.detectors[0].num_pairs


@dataclass(frozen=True, slots=True)
class Alarm:
    """A group whose `part` is accepted less often than `reference`, by more than chance. `observed`, `expected`: how
    often the first draft was accepted in the last comparisons."""

    group: Group
    part: Part
    reference: Reference
    num_compared: int
    observed: float
    expected: float

    @property
    def suspect(self) -> str:
        """The engine with the fault: drafts of a first verification after a handoff are the prefill engine's."""
        if self.part == "first_verification" and self.group.handed_off:
            return f"{self.group.prefill} to {self.group.decode}"
        return self.group.decode

    def describe(self) -> str:
        than = {
            "local": "for requests computed on one engine",
            "other_engines": "on other engines",
            "itself": "in the same requests' other verifications",
        }[self.reference]
        part = "first verifications" if self.part == "first_verification" else "later verifications"
        return (
            f"acceptance of {self.suspect} is too low: {self.observed:.0%} of the {part} ({self.group.describe()}) "
            f"accept a draft, {self.expected:.0%} {than}, in {self.num_compared} comparisons"
        )


@dataclass(slots=True)
class _Watched:
    comparisons: tuple[_Comparison, ...] = field(default_factory=lambda: tuple(_comparisons()))


class AcceptanceAlarms:
    """Watches acceptance by group. At most one in `detector.THRESHOLD` comparisons raises a false alarm."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_KEPT)
        self._num_samples = 0
        self._watched: dict[Group, _Watched] = {}

    def observe(self, request: RequestAcceptance) -> None:
        """The request ran on one route from beginning to end."""
        parts: dict[Part, _Figures | None] = {
            "first_verification": _Figures.of(*request.first),
            "later_verifications": _Figures.of(*request.later),
        }
        if parts["first_verification"] is None and parts["later_verifications"] is None:
            return
        watched = self._watched.pop(request.group, None) or _Watched()
        self._watched[request.group] = watched
        if len(self._watched) > _MAX_GROUPS:
            del self._watched[next(iter(self._watched))]
        for comparison in watched.comparisons:
            observed = parts[comparison.part]
            reference = self._reference(comparison, request.group, parts)
            if observed is not None and reference is not None and comparison.observe(observed, reference):
                alarm = _alarm(request.group, comparison)
                if comparison.alarmed:
                    logger.warning("%s", alarm.describe())
                else:
                    logger.info("acceptance of %s is normal again (%s)", alarm.suspect, request.group.describe())
        self._samples.append(_Sample(request.group, parts))
        self._num_samples += 1

    def alarms(self) -> list[Alarm]:
        return [
            _alarm(group, comparison)
            for group, watched in self._watched.items()
            for comparison in watched.comparisons
            if comparison.alarmed
        ]

    def num_comparisons(self) -> int:
        """Comparisons that could have raised an alarm."""
        return sum(c.num_pairs for watched in self._watched.values() for c in watched.comparisons)

    def _reference(self, comparison: _Comparison, group: Group, parts: dict[Part, _Figures | None]) -> _Figures | None:
        if comparison.reference == "itself":
            other: Part = "first_verification" if comparison.part == "later_verifications" else "later_verifications"
            return parts[other]
        oldest = self._num_samples - len(self._samples)
        for number in range(max(comparison.next, oldest), self._num_samples):
            sample = self._samples[number - oldest]
            figures = sample.parts[comparison.part]
            comparison.next = number + 1
            if figures is not None and _MATCHES[comparison.reference](sample.group, group):
                return figures
        return None


def _comparisons() -> list[_Comparison]:
    margins: tuple[tuple[Reference, float], ...] = (
        ("local", MARGIN),
        ("other_engines", MARGIN),
        ("itself", OWN_MARGIN),
    )
    parts: tuple[Part, ...] = ("first_verification", "later_verifications")
    return [
        _Comparison(part, reference, (DropDetector(margin), DropDetector(margin)))
        for part in parts
        for reference, margin in margins
    ]


# Local requests are compared with those of other engines, not with each other.
_MATCHES: dict[Reference, Callable[[Group, Group], bool]] = {
    "local": lambda sample, group: group.handed_off and not sample.handed_off,
    "other_engines": lambda sample, group: sample.decode != group.decode,
}


def _alarm(group: Group, comparison: _Comparison) -> Alarm:
    observed, expected = (sum(values) / len(comparison.last) for values in zip(*comparison.last, strict=True))
    return Alarm(group, comparison.part, comparison.reference, comparison.num_pairs, observed, expected)
