"""How another number of prefill or decode engines would change the time to first token.

Recent requests are replayed as docs/router.md says: waits are computed, all else was measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.observe.acceptance import HANDED_OFF
from baton.observe.timeline import RequestTimeline

MIN_REQUESTS = 50
# Smaller changes of the TTFT are not reported.
_WORTH = 0.1
_PERCENTILE = 0.9
# For engines that report no waits: this quantile of seconds per token is without.
_UNQUEUED = 0.1


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A handed-off request, in seconds. `prefill`: from the choice of engines to the `first` token. `queued`: the
    prompt's wait; None: unknown. `decode`: the rest.
    """

    arrived: float
    first: float
    prefill: float
    queued: float | None
    decode: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """`slots`: requests at once per decode engine; None: unlimited, or unknown."""

    prefill: int
    decode: int
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """`ttft_s`: the replay's 90th percentile; `changes`: that of other fleets."""

    num_requests: int
    ttft_s: float
    changes: dict[str, float]

    @property
    def text(self) -> str:
        if not self.changes:
            return "there is nothing to change"
        best = min(self.changes, key=self.changes.__getitem__)
        cut = 1.0 - self.changes[best] / self.ttft_s if self.ttft_s > 0.0 else 0.0
        if cut < _WORTH:
            return "prefill and decode engines are in balance: no single change would cut TTFT p90 by a tenth"
        return (
            f"{best} would cut TTFT p90 by {cut:.0%}, from {self.ttft_s * 1e3:.0f} to {self.changes[best] * 1e3:.0f} ms"
        )

    def describe(self) -> dict[str, object]:
        """For `/status`, in milliseconds."""
        changes = {name: round(seconds * 1e3, 1) for name, seconds in self.changes.items()}
        return {
            "text": self.text,
            "num_requests": self.num_requests,
            "replayed_ttft_p90_ms": round(self.ttft_s * 1e3, 1),
            "with": changes,
        }


def served_requests(timelines: Iterable[RequestTimeline]) -> list[ServedRequest]:
    """Requests that were handed off and completed in one attempt."""
    return [
        ServedRequest(
            one.began, one.first, one.first - one.routed, one.queued_s, one.ended - one.first, one.num_prompt_tokens
        )
        for one in timelines
        if one.route == HANDED_OFF and one.finish in ("stop", "length") and not one.resumed
        if one.first is not None and one.routed is not None and one.ended is not None
    ]


def advise(requests: Sequence[ServedRequest], fleet: Fleet) -> Advice | None:
    """None if too little is known."""
    if len(requests) < MIN_REQUESTS or not fleet.prefill or not fleet.decode:
        return None
    work = _work(requests, fleet.prefill)
    fleets = {
        "one more prefill engine": Fleet(fleet.prefill + 1, fleet.decode, fleet.slots),
        "one more decode engine": Fleet(fleet.prefill, fleet.decode + 1, fleet.slots),
    }
    if fleet.decode > 1:
        fleets["a decode engine as a prefill engine"] = Fleet(fleet.prefill + 1, fleet.decode - 1, fleet.slots)
    if fleet.prefill > 1:
        fleets["a prefill engine as a decode engine"] = Fleet(fleet.prefill - 1, fleet.decode + 1, fleet.slots)
    changes = {name: replay(work, other) for name, other in fleets.items()}
    return Advice(len(requests), replay(work, fleet), changes)


def replay(work: Sequence[tuple[float, float, float]], fleet: Fleet) -> float:
    """The 90th percentile of TTFT in seconds. `work`: arrival, prefill and decode of each request, by arrival."""
    engines = [0.0] * fleet.prefill
    slots = None if fleet.slots is None else [0.0] * (fleet.slots * fleet.decode)
    ttfts = []
    for arrived, prefill, decode in work:
        begins = arrived if slots is None else max(arrived, heapq.heappop(slots))
        first = max(begins, engines[0]) + prefill
        heapq.heapreplace(engines, first)
        if slots is not None:
            heapq.heappush(slots, first + decode)
        ttfts.append(first - arrived)
    return sorted(ttfts)[min(len(ttfts) - 1, int(_PERCENTILE * len(ttfts)))]


def _work(requests: Sequence[ServedRequest], engines: int) -> list[tuple[float, float, float]]:
    paces = sorted(one.prefill / max(1, one.num_prompt_tokens) for one in requests if one.queued is None)
    pace = paces[int(_UNQUEUED * len(paces))] if paces else 0.0
    busy = _busy_until([_computed(one, one.queued) for one in requests if one.queued is not None], engines)
    work = []
    for one in sorted(requests, key=lambda one: one.arrived):
        if one.queued is None:
            alone = min(pace * one.num_prompt_tokens, one.prefill)
        else:
            begin, end = _computed(one, one.queued)
            alone = busy[end] - busy[begin]
        work.append((one.arrived, alone, one.decode))
    return work


def _computed(one: ServedRequest, queued: float) -> tuple[float, float]:
    return one.first - max(0.0, one.prefill - queued), one.first


def _busy_until(spans: Iterable[tuple[float, float]], engines: int) -> dict[float, float]:
    """Seconds of work up to each edge: prompts computed together share the engines."""
    edges = sorted((time, step) for begin, end in spans for time, step in ((begin, 1), (end, -1)))
    busy, active, found = 0.0, 0, {}
    last = edges[0][0] if edges else 0.0
    for time, step in edges:
        busy += (time - last) * min(1.0, engines / max(1, active))
        found[time] = busy
        active, last = active + step, time
    return found
