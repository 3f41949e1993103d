"""Current faults of a deployment: one line each, for `/status`, the dashboard and `baton status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.observe.recent import RecentRequests

# Why requests took a route, by its name in `decisions`.
REASONS = {
    "handed_off": "prefill and decode engines were there, and the prompt was worth a handoff",
    "short": "the prompt was short",
    "cached": "the decode engine held most of the prompt",
    "no_prefill_engine": "no prefill engine answered",
    "no_decode_engine": "no decode engine answered",
    "both_roles": "engines of role both served them",
    "resumed": "they were resumed",
    "scored": "prompt logprobs need one engine",
}
# Shares of KV in use that make an engine full: without, and with requests that wait for it.
_FULL, _FULL_WITH_WAITING = 0.9, 0.5
_MIN_ROUTES = 20
_MAX_PROBLEM = 300
_LAST_ENDED, _MIN_FAILED = 20, 5
# A handoff is slow if the second token takes this long, and this many times as long as later ones.
_SLOW_S, _SLOW_TOKENS = 0.1, 20.0


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as the router sees it. `kv_usage`, `num_waiting` None: it did not report its load."""

    name: str
    url: str
    role: str
    usable: bool
    problem: str
    kv_usage: float | None = None
    num_waiting: int | None = None


def find_faults(
    engines: Sequence[EngineView], last_routes: Mapping[str, int], recent: RecentRequests, now: float
) -> list[str]:
    """`last_routes`: of the last requests, how many took which route. `now`: monotonic seconds."""
    # A full decode engine delays handoffs and fills prefill engines.
    full = list(_full([engine for engine in engines if engine.role == "decode"]))
    return [
        *_lost(engines),
        *(full or _full(engines)),
        *_not_handed_off(engines, last_routes),
        *(() if full else _slow_handoffs(recent, now)),
        *_failed(recent),
    ]


def count_faults(
    engines: Sequence[EngineView], last_routes: Mapping[str, int], recent: RecentRequests, now: float
) -> dict[str, int]:
    """The faults that are found without engines' loads, by kind."""
    return {
        "lost_engine": len(list(_lost(engines))),
        "not_handed_off": len(list(_not_handed_off(engines, last_routes))),
        "slow_handoffs": len(list(_slow_handoffs(recent, now))),
        "failed_requests": len(list(_failed(recent))),
    }


def _lost(engines: Sequence[EngineView]) -> Iterator[str]:
    for engine in engines:
        if not engine.usable:
            problem = engine.problem.removeprefix(f"engine {engine.url}").removeprefix(":").strip()
            if len(problem) > _MAX_PROBLEM:
                problem = f"{problem[:_MAX_PROBLEM]} ... (all of it: problem in /status)"
            yield f"engine {engine.url} ({engine.role}) cannot be used: {problem}"


def _full(engines: Sequence[EngineView]) -> Iterator[str]:
    for engine in engines:
        limit = _FULL_WITH_WAITING if engine.num_waiting else _FULL
        if engine.kv_usage is not None and engine.kv_usage >= limit:
            waiting = f", {engine.num_waiting} requests wait there" if engine.num_waiting else ""
            yield f"{engine.role} engine {engine.name} is full: {engine.kv_usage:.0%} of its KV is in use{waiting}"


def _not_handed_off(engines: Sequence[EngineView], last: Mapping[str, int]) -> Iterator[str]:
    total = sum(last.values())
    if total >= _MIN_ROUTES and not last.get("handed_off") and {"prefill", "decode"} <= {e.role for e in engines}:
        reasons = "; ".join(f"{count} because {REASONS.get(why, why)}" for why, count in last.items() if count)
        yield f"none of the last {total} requests was handed off: {reasons}"


def _slow_handoffs(recent: RecentRequests, now: float) -> Iterator[str]:
    medians = recent.handoff_and_token_s(now)
    if medians is not None and medians[0] > max(_SLOW_S, _SLOW_TOKENS * medians[1]):
        second, token = (1e3 * seconds for seconds in medians)
        yield (
            f"handoffs are slow: the second token comes {second:.0f} ms after the first, later ones every "
            f"{token:.1f} ms: the network or the copies, not the engines"
        )


def _failed(recent: RecentRequests) -> Iterator[str]:
    failed, ended = recent.last_failed(_LAST_ENDED)
    if len(failed) >= _MIN_FAILED:
        yield f"{len(failed)} of the last {ended} requests failed; the last one: {failed[0].error}"
