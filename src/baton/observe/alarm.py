"""Alarms on acceptance: engines whose drafts are accepted far less often than others', by more than chance.
docs/router.md says what is judged, and against what.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from baton.observe.acceptance import Group, RequestAcceptance
from baton.observe.detector import DropDetector
from baton.observe.expected import DraftPair, ExpectedDrafts
from baton.observe.samples import LIFE, Figures, Part, Sample, SamplePool, Subject

logger = logging.getLogger(__name__)

Reference = Literal["local", "other_engines", "itself", "prefill_drafts"]
SHARE = 0.5
OWN_SHARE = 1 / 3  # first verifications may be easier
EXPECTED_SHARE = 0.8
_SHOWN = 100
_MAX_SUBJECTS = 1024
_LOCAL = ""  # the pool of all requests that one engine computed
_OF_ENGINE: tuple[tuple[Part, Reference], ...] = (("own_drafts", "other_engines"), ("own_drafts", "prefill_drafts"))
_OF_PAIR: tuple[tuple[Part, Reference], ...] = (
    ("first_verification", "local"),
    ("first_verification", "other_engines"),
    ("first_verification", "itself"),
    ("later_verifications", "local"),
    ("later_verifications", "itself"),
)


class _Observation(NamedTuple):
    """One request: observed and expected acceptance, for the operator; and an observation in [0, 1] whose mean is at
    least `limit` without a fault.
    """

    observed: float
    expected: float
    tested: float
    limit: float

    @classmethod
    def by_mean(cls, observed: Figures, reference: Figures, share: float) -> _Observation:
        limit = share * reference.any_accepted
        return cls(observed.first_draft, reference.first_draft, observed.any_accepted, limit)

    @classmethod
    def by_prefill(cls, pair: DraftPair, ratio: float, least: float) -> _Observation:
        """Without a fault, the mean of `later - bound * first` is at least 0, whatever the prompts."""
        bound = EXPECTED_SHARE * least
        tested, limit = (pair.later - bound * pair.first + bound) / (1.0 + bound), bound / (1.0 + bound)
        return cls(pair.later, ratio * pair.first, tested, limit)


@dataclass(slots=True)
class _Comparison:
    part: Part
    reference: Reference
    detector: DropDetector = field(default_factory=DropDetector)
    observed: float = 0.0
    expected: float = 0.0

    def observe(self, observation: _Observation) -> bool:
        """Returns whether an alarm has begun or ended."""
        before = self.alarmed
        weight = 1 / min(self.num_compared + 1, _SHOWN)
        self.observed += weight * (observation.observed - self.observed)
        self.expected += weight * (observation.expected - self.expected)
        self.detector.observe(observation.tested, observation.limit)
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
    often a verification accepted a draft, in the mean of the last requests (by `prefill_drafts`: the share of drafts
    that were accepted)."""

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
        if self.reference == "prefill_drafts":
            return (
                f"acceptance of {self.suspect} is too low: {self.observed:.0%} of its own drafts are accepted, "
                f"{self.expected:.0%} are expected by the prefill engine's drafts of the same requests and by other "
                f"engines, in {self.num_compared} requests"
            )
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
    """By decode engine and by engine pair."""

    def __init__(self) -> None:
        self._pools: dict[str, SamplePool] = {}
        self._watched: dict[Subject, tuple[_Comparison, ...]] = {}
        self._expected = ExpectedDrafts()
        self._num_requests = 0
        self._prompts: dict[tuple[Group, int], int] = {}  # their last request

    def observe(self, request: RequestAcceptance) -> None:
        """`request` ran on one route. Repeated prompts count once."""
        self._num_requests += 1
        if request.prompt is not None and self._is_again(request.group, request.prompt):
            return
        group, sample = request.group, Sample.of(request, self._num_requests)
        pair = DraftPair.of(request)
        self._compare(Subject("", group.decode), sample, pair)
        if group.handed_off:
            self._compare(Subject(group.prefill, group.decode), sample, pair)
        if pair is not None:
            self._expected.add(group.decode, pair)
        for name in (group.route,) if group.handed_off else (group.route, _LOCAL):
            self._pool(name).add(sample)

    def _is_again(self, group: Group, prompt: int) -> bool:
        last = self._prompts.pop((group, prompt), None)
        self._prompts[group, prompt] = self._num_requests
        if len(self._prompts) > LIFE:
            del self._prompts[next(iter(self._prompts))]
        return last is not None and last > self._num_requests - LIFE

    def alarms(self) -> list[Alarm]:
        return [
            _alarm(subject, comparison)
            for subject, comparisons in self._watched.items()
            for comparison in comparisons
            if comparison.alarmed
        ]

    def num_comparisons(self) -> int:
        return sum(one.num_compared for comparisons in self._watched.values() for one in comparisons)

    def _compare(self, subject: Subject, sample: Sample, pair: DraftPair | None) -> None:
        wanted = _OF_PAIR if subject.prefill else _OF_ENGINE
        comparisons = self._watched.pop(subject, None) or tuple(_Comparison(*one) for one in wanted)
        self._watched[subject] = comparisons
        if len(self._watched) > _MAX_SUBJECTS:
            del self._watched[next(iter(self._watched))]
        for comparison in comparisons:
            observation = self._observation(comparison, subject, sample, pair)
            if observation is not None and comparison.observe(observation):
                alarm = _alarm(subject, comparison)
                if comparison.alarmed:
                    logger.warning("%s", alarm.describe())
                else:
                    logger.info("acceptance of %s is normal again", alarm.suspect)

    def _observation(
        self, comparison: _Comparison, subject: Subject, sample: Sample, pair: DraftPair | None
    ) -> _Observation | None:
        """None if the request lacks the part, or something to compare it with."""
        if comparison.reference == "prefill_drafts":
            ratio = None if pair is None else self._expected.ratio(without=subject.decode)
            return None if pair is None or ratio is None else _Observation.by_prefill(pair, *ratio)
        observed = sample.parts[comparison.part]
        reference = None if observed is None else self._reference(comparison, subject, sample)
        if observed is None or reference is None:
            return None
        return _Observation.by_mean(observed, reference, OWN_SHARE if comparison.reference == "itself" else SHARE)

    def _reference(self, comparison: _Comparison, subject: Subject, sample: Sample) -> Figures | None:
        part, pool = comparison.part, self._pool(sample.group.route)
        local = self._pool(_LOCAL).mean(part, of=Subject("", subject.decode))
        match comparison.reference:
            case "local":
                return local
            case "other_engines":
                return pool.mean(part, without=subject)
            case _:  # itself
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
    figures = comparison.num_compared, comparison.observed, comparison.expected
    return Alarm(subject, comparison.part, comparison.reference, *figures)
