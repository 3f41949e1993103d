"""Routes of requests: handed off between two engines, or computed on one.

Every engine can prefill and decode; a role says what it is used for. A request is handed off if that pays and both
roles are there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import chain_of
from baton.wire import GenerateRequest, Role

Why = Literal[
    "handed_off", "cached", "short", "no_prefill_engine", "no_decode_engine", "both_roles", "resumed", "scored"
]
WHYS: tuple[Why, ...] = get_args(Why)
PREFIX_MISSING = "prefix_missing"  # an engine's reason to decline
# An engine with a cached prefix may have up to this many more legs than the one whose turn it is.
_SLACK_LEGS = 1
_LAST = 100


@dataclass(frozen=True, slots=True)
class Route:
    """The engines of one attempt. Without `prefill`, `decode` computes all, but declines if it lacks the KV of more
    than `max_prefill_tokens` of the prompt (None: never).
    """

    why: Why
    decode: PooledEngine
    prefill: PooledEngine | None = None
    max_prefill_tokens: int | None = None


class Decisions:
    """Counts of routes by reason: of all attempts, and of the first attempts of the last 100 requests. `stale`: routes
    that were declined because the engine lacked more than expected.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.stale = 0
        self._last: deque[Why] = deque(maxlen=_LAST)

    def took(self, why: Why) -> None:
        """Count the first attempt of a request."""
        self.counts[why] += 1
        self._last.append(why)

    def took_again(self, why: Why) -> None:
        """Count a later attempt of a request."""
        self.counts[why] += 1

    def describe(self) -> dict[str, object]:
        counts: dict[str, object] = {why: self.counts[why] for why in WHYS}
        last = Counter(self._last)
        recent = {why: last[why] for why in WHYS if last[why]}
        return {"summary": self.summary(), **counts, "stale": self.stale, "last": recent}

    def summary(self) -> str:
        last = Counter(self._last)
        handed = last.pop("handed_off", 0)
        local = ", ".join(f"{why.replace('_', ' ')} {last[why]}" for why in WHYS if last[why])
        text = f"{handed} of the last {len(self._last)} handed off, {sum(last.values())} local"
        return f"{text}: {local}" if local else text


class Routes:
    """Chooses routes. A prompt of which the decode engine lacks at most `max_local_prefill_length` tokens is computed
    there; 0: none is, while there is a prefill engine.
    """

    def __init__(self, pool: EnginePool, max_local_prefill_length: int = 0) -> None:
        self._pool = pool
        self._most = max_local_prefill_length

    def choose(self, request: GenerateRequest, tried: Sequence[PooledEngine], hand_off: bool) -> Route | None:
        """A route over healthy engines that may serve the request, or else suspected ones, or None. Engines in `tried`
        are a last choice for their role. `hand_off`: even if the decode engine holds the prompt.
        """
        for healthy in (True, False):
            usable = self._pool.usable(healthy)

            def of(role: Role, usable: list[PooledEngine] = usable) -> list[PooledEngine]:
                mine = [engine for engine in usable if engine.role == role and engine.may_serve(request)]
                return [engine for engine in mine if engine not in tried] or mine

            route = self._among(request, of("prefill"), of("decode"), of("both"), hand_off)
            if route is not None:
                return route
        return None

    def _among(
        self,
        request: GenerateRequest,
        prefill: list[PooledEngine],
        decode: list[PooledEngine],
        both: list[PooledEngine],
        hand_off: bool,
    ) -> Route | None:
        take = self._pool.take
        if request.sampling_params.prompt_logprobs is not None and (some := prefill or both or decode):
            return Route("scored", take(some))  # prompt logprobs need the whole prompt computed on one engine
        if prefill and decode:
            chosen = take(decode)
            local = None if hand_off or not self._most else self._local(request, decode, chosen)
            return local or Route("handed_off", chosen, take(prefill))
        if both:
            return Route("both_roles", take(both))
        if decode:
            return Route("no_prefill_engine", take(decode))
        return Route("no_decode_engine", take(prefill)) if prefill else None

    def _local(self, request: GenerateRequest, decode: list[PooledEngine], chosen: PooledEngine) -> Route | None:
        tokens = request.prompt_token_ids
        if len(tokens) <= self._most:
            return Route("short", chosen)
        chain = _chain(request)
        near = [
            engine
            for engine in decode
            if engine.num_inflight <= chosen.num_inflight + _SLACK_LEGS
            and len(tokens) - engine.known.num_tokens(chain) <= self._most
        ]
        if not near:
            return None
        best = chosen if chosen in near else min(near, key=lambda engine: engine.num_inflight)
        return Route("cached", best, max_prefill_tokens=self._most)

    def served(self, route: Route, request: GenerateRequest, output: Sequence[int]) -> None:
        """The decoding engine has the KV of the request and its `output`."""
        if self._most:
            route.decode.known.learn(_chain(request, output))

    def declined(self, route: Route, request: GenerateRequest) -> None:
        """The decoding engine lacks KV that it was expected to have."""
        route.decode.known.forget(_chain(request))


def _chain(request: GenerateRequest, output: Sequence[int] = ()) -> list[bytes]:
    return chain_of([*request.prompt_token_ids, *output], request.cache_salt or "")
