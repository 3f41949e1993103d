"""Recent requests: running and ended ones, latencies over time, and the last errors."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from baton.observe.acceptance import HANDED_OFF
from baton.observe.timeline import RequestTimeline

MAX_ENDED = 1000
_BUCKET_S = 10
_NUM_BUCKETS = 60
_MAX_PER_BUCKET = 500
_NEW = 6  # intervals in a minute
_MAX_ERRORS = 50
_NUM_LISTED = 20


@dataclass(slots=True)
class _Bucket:
    """Latencies, in seconds, of requests that ended in one interval."""

    number: int
    num_requests: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    handoff: list[float] = field(default_factory=list)
    later_token: list[float] = field(default_factory=list)

    def add(self, request: RequestTimeline) -> None:
        self.num_requests += 1
        for into, value in (
            (self.ttft, request.ttft_s),
            (self.tpot, request.tpot_s),
            (self.handoff, request.handoff_s),
            (self.later_token, request.later_token_s),
        ):
            if value is not None and len(into) < _MAX_PER_BUCKET:
                into.append(value)


class LatencySeries:
    """Medians of TTFT, TPOT and the wait for the second token over the last ten minutes."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque(maxlen=_NUM_BUCKETS)

    def observe(self, now: float, request: RequestTimeline) -> None:
        number = int(now // _BUCKET_S)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        self._buckets[-1].add(request)

    def newest(self, now: float, min_requests: int) -> _Bucket | None:
        """The newest interval of the last minute with enough handoffs."""
        oldest = int(now // _BUCKET_S) - _NEW
        good = (one for one in reversed(self._buckets) if one.number > oldest and len(one.handoff) >= min_requests)
        return next(good, None)

    def describe(self, now: float) -> list[dict[str, object]]:
        """`age_s`: how long ago the interval ended."""
        newest = int(now // _BUCKET_S)
        return [
            {
                "age_s": (newest - bucket.number) * _BUCKET_S,
                "num_requests": bucket.num_requests,
                "ttft_ms": median(bucket.ttft) * 1e3 if bucket.ttft else None,
                "tpot_ms": median(bucket.tpot) * 1e3 if bucket.tpot else None,
                "handoff_ms": median(bucket.handoff) * 1e3 if bucket.handoff else None,
            }
            for bucket in self._buckets
            if newest - bucket.number < _NUM_BUCKETS
        ]


class RecentRequests:
    """One router's requests, without prompts and answers."""

    def __init__(self) -> None:
        self._running: dict[int, RequestTimeline] = {}
        self._ended: OrderedDict[int, RequestTimeline] = OrderedDict()
        self._handed_off, self._local = LatencySeries(), LatencySeries()
        self._errors: deque[RequestTimeline] = deque(maxlen=_MAX_ERRORS)
        self.num_begun = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, request: RequestTimeline) -> None:
        self.num_begun += 1
        self._running[id(request)] = request

    def end(self, request: RequestTimeline) -> None:
        """Call `on_end` before."""
        self._running.pop(id(request), None)
        assert request.ended is not None
        self._ended[id(request)] = request
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if request.error:
            self._errors.append(request)
        if request.finish in ("stop", "length"):
            (self._handed_off if request.route == HANDED_OFF else self._local).observe(request.ended, request)

    def find(self, wanted: str) -> list[RequestTimeline]:
        """By id of a choice or of all choices, or by `X-Request-Id`; newest first."""
        return [one for one in self._newest() if wanted in (one.id, one.id.rpartition("-")[0], one.http_id)]

    def handoff_and_token_s(self, now: float) -> tuple[float, float] | None:
        """Medians of handed-off requests of the last minute: the wait for the second token, and the time per later
        token. None if there were fewer than five."""
        bucket = self._handed_off.newest(now, min_requests=5)
        return (
            None if bucket is None or not bucket.later_token else (median(bucket.handoff), median(bucket.later_token))
        )

    def last_failed(self, count: int) -> tuple[list[RequestTimeline], int]:
        """The failed ones, except refused ones, among the last `count` ended requests, newest first; and how many were
        looked at."""
        last = [one for one, _ in zip(reversed(self._ended.values()), range(count), strict=False)]
        return [one for one in last if one.error and one.finish != "refused"], len(last)

    def ended(self) -> Iterable[RequestTimeline]:
        """Oldest first."""
        return self._ended.values()

    def stages(self) -> dict[str, int]:
        counts = Counter(request.stage for request in self._running.values())
        return {stage: counts[stage] for stage in ("waiting", "prefill", "handoff", "decode")}

    def describe(self, now: float) -> dict[str, object]:
        newest = [request.summary() for request, _ in zip(self._newest(), range(_NUM_LISTED), strict=False)]
        return {
            "num_requests": self.num_begun,
            "stages": self.stages(),
            "latency": {"handed_off": self._handed_off.describe(now), "local": self._local.describe(now)},
            "requests": newest,
            "errors": [request.summary() for request in reversed(self._errors)],
        }

    def _newest(self) -> Iterable[RequestTimeline]:
        yield from reversed(self._running.values())
        yield from reversed(self._ended.values())
