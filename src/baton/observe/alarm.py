"""Alarms on acceptance: engines whose drafts are accepted far less often than others', by more than chance.

A decode engine has one drafter, so its own drafts are judged over all routes, against the last requests of the same
route on other engines. The effect of a handoff is judged by engine pair: the first verification, which is of the
prefill engine's drafts, and the later ones.

An alarm means less than half of the acceptance elsewhere: different prompts explain smaller differences.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from baton.observe.acceptance import RequestAcceptance
from baton.observe.detector import DropDetector
from baton.observe.samples import Figures, Part, Sample, SamplePool, Subject

logger = logging.getLogger(__name__)

Reference = Literal["local", "other_engines", "itself"]
SHARE = 0.5
OWN_SHARE = 1 / 3  # first verifications may be easier
_SHOWN = 100
_MAX_SUBJECTS = 1024
_LOCAL = ""  # the pool of all requests computed by one engine
_OF_ENGINE: tuple[tuple[Part, Reference], ...] = (("own_drafts", "other_engines"),)
_OF_PAIR: tuple[tuple[Part, Reference], ...] = (
    ("first_verification", "local"),
    ("first_verification", "other_engines"),
    ("first_verification", "itself"),
    ("later_verifications", "local"),
    ("later_verifications", "itself"),
)


@dataclass(slots=True)
class _Comparison:
    """One part of a subject's requests against one reference."""

    part: Part
    reference: Reference
    detector: DropDetector = field(default_factory=DropDetector)
    observed: float = 0.0
    expected: float = 0.0

    def observe(self, observed: Figures, reference: Figures) -> bool:
        """Returns whether an alarm has begun or ended."""
        before = self.alarmed
        weight = 1 / min(self.num_compared + 1, _SHOWN)
        self.observed += weight * (observed.first_draft - self.observed)
        self.expected += weight * (reference.first_draft - self.expected)
        share = OWN_SHARE if self.reference == "itself" else SHARE
        self.detector.observe(observed.any_accepted, share * reference.any_accepted)
        return self.alarmed != before

    @property
    def alarmed(self) -> bool:
        return self.detector.alarmed

    @property
    def num_compared(self) -> int:
        return self.detector.num_observed


@dataclass(frozen=True, slots=True)
class Alarm:
    """A subject whose `part` is accepted less often than `reference`, by more than chance. `observed`, `expected`: how
    often a draft was accepted, in the mean of the last requests."""

    subject: Subject
    part: Part
    reference: Reference
    num_compared: int
    observed: float
    expected: float

    @property
    def suspect(self) -> str:
        """The engine with the fault: drafts of a first verification after a handoff are the prefill engine's."""
        pair = f"{self.subject.prefill} to {self.subject.decode}"
        return pair if self.part == "first_verification" else self.subject.decode

    def describe(self) -> str:
        than = {
            "local": f"for requests that {self.subject.decode} computed alone",
            "other_engines": "on other engines",
            "itself": "in the same requests' other verifications",
        }[self.reference]
        part = {
            "own_drafts": "verifications of its own drafts",
            "first_verification": "first verifications after a handoff",
            "later_verifications": f"later verifications after a handoff from {self.subject.prefill}",
        }[self.part]
        return (
            f"acceptance of {self.suspect} is too low: {self.observed:.0%} of the {part} accept one, "
            f"{self.expected:.0%} {than}, in {self.num_compared} requests"
        )


class AcceptanceAlarms:
    """Watches acceptance by decode engine and by engine pair."""

    def __init__(self) -> None:
        self._pools: dict[str, SamplePool] = {}
        self._watched: dict[Subject, tuple[_Comparison, ...]] = {}
        self._num_requests = 0

    def observe(self, request: RequestAcceptance) -> None:
        """Add a request that ran on one route from beginning to end."""
        self._num_requests += 1
        group, sample = request.group, Sample.of(request, self._num_requests)
        self._compare(Subject("", group.decode), sample)
        if group.handed_off:
            self._compare(Subject(group.prefill, group.decode), sample)
        for name in (group.route,) if group.handed_off else (group.route, _LOCAL):
            self._pool(name).add(sample)

    def alarms(self) -> list[Alarm]:
        return [
            _alarm(subject, comparison)
            for subject, comparisons in self._watched.items()
            for comparison in comparisons
            if comparison.alarmed
        ]

    def num_comparisons(self) -> int:
        """The comparisons that could have raised an alarm."""
        return sum(one.num_compared for comparisons in self._watched.values() for one in comparisons)

    def _compare(self, subject: Subject, sample: Sample) -> None:
        wanted = _OF_PAIR if subject.prefill else _OF_ENGINE
        comparisons = self._watched.pop(subject, None) or tuple(_Comparison(*one) for one in wanted)
        self._watched[subject] = comparisons
        if len(self._watched) > _MAX_SUBJECTS:
            del self._watched[next(iter(self._watched))]
        for comparison in comparisons:
            observed = sample.parts[comparison.part]
            if observed is None:
                continue
            reference = self._reference(comparison, subject, sample)
            if reference is not None and comparison.observe(observed, reference):
                alarm = _alarm(subject, comparison)
                if comparison.alarmed:
                    logger.warning("%s", alarm.describe())
                else:
                    logger.info("acceptance of %s is normal again", alarm.suspect)

    def _reference(self, comparison: _Comparison, subject: Subject, sample: Sample) -> Figures | None:
        part, pool = comparison.part, self._pool(sample.group.route)
        local = self._pool(_LOCAL).mean(part, of=Subject("", subject.decode))
        match comparison.reference:
            case "local":
                return local
            case "other_engines":
                return pool.mean(part, without=subject)
            case "itself":
                alone = local is None and pool.mean(part, without=subject) is None
                return pool.mean(_OTHER[part], of=subject) if alone else None

    def _pool(self, name: str) -> SamplePool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = SamplePool()
        pool.forget(self._num_requests)
        return pool


_OTHER: dict[Part, Part] = {
    "first_verification": "later_verifications",
    "later_verifications": "first_verification",
}


def _alarm(subject: Subject, comparison: _Comparison) -> Alarm:
    told = comparison.num_compared, comparison.observed, comparison.expected
    return Alarm(subject, comparison.part, comparison.reference, *told)
