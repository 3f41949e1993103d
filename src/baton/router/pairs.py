"""Pairs of engines that refuse each other."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from baton.router.pooled_engine import PooledEngine
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, Role, differ_in_protocol

logger = logging.getLogger(__name__)

_LASTING, _PASSING = "incompatible_peer", ("unreachable_peer", "unhealthy_peer")
_MAX_PAIRS = 4096


@dataclass(slots=True)
class _Refusal:
    error: str
    trial_at: float  # in monotonic seconds


class Pairs:
    """Refusals by incarnations. A refused pair gets no requests until a trial by the router itself has worked."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`pause_s`: before a trial."""
        self._pause_s, self._clock = pause_s, clock
        self._refused: dict[tuple[str, str], _Refusal] = {}

    def note(self, prefill: PooledEngine, decode: PooledEngine, error: str) -> None:
        reason = error.partition(":")[0]
        if reason in (_LASTING, *_PASSING) and (ends := _ends(prefill, decode)) is not None:
            if ends not in self._refused:
                logger.error("engines %s and %s hand over nothing: %s", prefill.name, decode.name, error)
            while len(self._refused) >= _MAX_PAIRS:
                del self._refused[next(iter(self._refused))]
            pause_s = math.inf if reason == _LASTING else self._pause_s
            self._refused[ends] = _Refusal(error, self._clock() + pause_s)

    def worked(self, prefill: PooledEngine, decode: PooledEngine) -> None:
        if (ends := _ends(prefill, decode)) is not None and self._refused.pop(ends, None) is not None:
            logger.info("engines %s and %s hand over again", prefill.name, decode.name)

    def why_not(self, prefill: PooledEngine, decode: PooledEngine) -> str | None:
        """None: use them."""
        p, d = prefill.info, decode.info
        if p is None or d is None:
            return None
        if differ_in_protocol(p, d):
            return f"incompatible_peer: the handoff protocol has version {p.protocol} at P, {d.protocol} at D"
        found = self._refused.get((p.incarnation, d.incarnation)) if self._refused else None
        return None if found is None else found.error

    def refused(self, engines: Sequence[PooledEngine]) -> list[tuple[PooledEngine, PooledEngine, str]]:
        running = _running(engines)
        ends: Iterable[tuple[str, str]] = self._refused
        if len({engine.info.protocol for engine in engines if engine.info is not None}) > 1:
            prefills, decodes = ([name for its, name in running if its == role] for role in ("prefill", "decode"))
            ends = product(prefills, decodes)
        pairs = [(running.get(("prefill", p)), running.get(("decode", d))) for p, d in ends]
        return [(p, d, why) for p, d in pairs if p and d and (why := self.why_not(p, d)) is not None]

    def due(self, engines: Sequence[PooledEngine]) -> list[tuple[PooledEngine, PooledEngine]]:
        """Pairs to try now; each once a pause."""
        now, due, running = self._clock(), [], _running(engines)
        for ends, refusal in list(self._refused.items()):
            p, d = running.get(("prefill", ends[0])), running.get(("decode", ends[1]))
            if p is None or d is None:
                del self._refused[ends]
            elif refusal.trial_at <= now and p.healthy and d.healthy:
                refusal.trial_at = now + self._pause_s
                due.append((p, d))
        return due


def _running(engines: Sequence[PooledEngine]) -> dict[tuple[Role, str], PooledEngine]:
    """By role and incarnation."""
    return {(engine.role, engine.info.incarnation): engine for engine in engines if engine.info is not None}


def trial_request(name: str) -> GenerateRequest:
    """Two tokens, so that KV moves."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=f"trial-{name}", prompt_token_ids=[0, 0], sampling_params=params)


def _ends(prefill: PooledEngine, decode: PooledEngine) -> tuple[str, str] | None:
    p, d = prefill.info, decode.info
    return None if p is None or d is None else (p.incarnation, d.incarnation)
