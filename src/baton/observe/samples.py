"""Requests as samples for the alarm on acceptance, and mean figures of recent ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.observe.acceptance import Group, RequestAcceptance

Part = Literal["own_drafts", "first_verification", "later_verifications"]
_ANY_OF = 3
_KEPT = 256
LIFE = 4096
_MIN_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one request's verifications, or means over requests, each in [0, 1]: whether any of the first three
    accepted a draft, which depends little on the prompt, and the share that accepted one.
    """

    any_accepted: float
    first_draft: float

    @classmethod
    def of(cls, accepted: Sequence[int], drafted: Sequence[int]) -> Figures | None:
        """None without drafts."""
        pairs = [(a, d) for a, d in zip(accepted, drafted, strict=False) if d]
        if not pairs:
            return None
        return cls(
            float(any(a for a, _ in pairs[:_ANY_OF])),
            sum(a > 0 for a, _ in pairs) / len(pairs),
        )


class Subject(NamedTuple):
    """A decode engine (`prefill` is empty) or an engine pair."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Request `number`. `own_drafts`: the decode engine's."""

    group: Group
    number: int
    parts: dict[Part, Figures | None]

    @classmethod
    def of(cls, request: RequestAcceptance, number: int) -> Sample:
        first, later = Figures.of(*request.first), Figures.of(*request.later)
        own = later if request.group.handed_off else Figures.of(request.accepted, request.drafted)
        parts: dict[Part, Figures | None] = {"own_drafts": own, "first_verification": first}
        return cls(request.group, number, parts | {"later_verifications": later})

    def subjects(self) -> Iterator[tuple[Part, Subject]]:
        yield "own_drafts", Subject("", self.group.decode)
        pair = Subject(self.group.prefill, self.group.decode)
        yield "first_verification", pair
        yield "later_verifications", pair


@dataclass(slots=True)
class _Sums:
    count: int = 0
    any_accepted: float = 0.0
    first_draft: float = 0.0

    def add(self, figures: Figures, sign: int) -> None:
        self.count += sign
        self.any_accepted += sign * figures.any_accepted
        self.first_draft += sign * figures.first_draft


_NONE = _Sums()


class SamplePool:
    """The last requests of one route, or all that one engine computed, with their sums by part and subject."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._sums: dict[tuple[Part, Subject | None], _Sums] = {}

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._count(sample, 1)
        if len(self._samples) > _KEPT:
            self._count(self._samples.popleft(), -1)

    def forget(self, number: int) -> None:
        """Forget all but the last `LIFE` requests. `number`: of the newest."""
        while self._samples and self._samples[0].number < number - LIFE:
            self._count(self._samples.popleft(), -1)

    def mean(self, part: Part, of: Subject | None = None, without: Subject | None = None) -> Figures | None:
        """Over the requests of one subject, or all but another's. None if there are too few."""
        sums = self._sums.get((part, of), _NONE)
        left_out = _NONE if without is None else self._sums.get((part, without), _NONE)
        count = sums.count - left_out.count
        if count < _MIN_SAMPLES:
            return None
        return Figures(
            (sums.any_accepted - left_out.any_accepted) / count,
            (sums.first_draft - left_out.first_draft) / count,
        )

    def _count(self, sample: Sample, sign: int) -> None:
        for part, subject in sample.subjects():
            figures = sample.parts[part]
            if figures is None:
                continue
            for key in ((part, None), (part, subject)):
                sums = self._sums.get(key)
                if sums is None:
                    sums = self._sums[key] = _Sums()
                sums.add(figures, sign)
                if not sums.count:
                    del self._sums[key]
