"""Routes of requests: handed off between two engines, or computed on one.

The decode engine is chosen first (docs/router.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, get_args

import msgspec
from msgspec.structs import replace

from baton.errors import OverloadedError
from baton.router.hand_back import HandBack, HandBacks
from baton.router.pairs import Pairs
from baton.router.policies import EngineNeeds, Policies, PolicyConfig
from baton.router.policies.base import cost
from baton.router.pooled_engine import Charge, PooledEngine
from baton.router.prefixes import PromptBlocks, prompt_of
from baton.wire import GenerateRequest, LegRole, Role

Why = Literal[
    "handed_off", "cached", "short", "no_prefill_engine", "no_decode_engine", "both_roles", "resumed", "scored"
]
WHYS: tuple[Why, ...] = get_args(Why)
PREFIX_MISSING = "prefix_missing"  # an engine's reason to decline
# With a cached prefix an engine may have this many more legs than the next in turn.
_SLACK_LEGS = 1
_LAST = 100


class Route(msgspec.Struct, frozen=True):
    """The engines of one attempt. Without `prefill`, `decode` computes everything, but declines if it lacks the KV of
    more than `max_prefill_tokens` (None: never). `hand_back`: the prefill engine first gets KV of the prompt's
    beginning. `prompt`: of the attempt that chose it."""

    why: Why
    decode: PooledEngine
    prefill: PooledEngine | None = None
    max_prefill_tokens: int | None = None
    hand_back: HandBack | None = None
    charges: Mapping[LegRole, Charge] = msgspec.field(default_factory=dict)
    prompt: PromptBlocks | None = None

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in (self.prefill, self.decode) if engine is not None]

    def engine(self, leg: LegRole) -> PooledEngine:
        return self.prefill if leg == "prefill" and self.prefill is not None else self.decode


class Decisions:
    """Counts of routes by reason. `stale`: declined because the engine lacked more than expected."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.stale = 0
        self._last: deque[Why] = deque(maxlen=_LAST)

    def took(self, why: Why) -> None:
        self.counts[why] += 1
        self._last.append(why)

    def took_again(self, why: Why) -> None:
        self.counts[why] += 1

    def describe(self) -> dict[str, object]:
        counts: dict[str, object] = {why: self.counts[why] for why in WHYS}
        return {"summary": self.summary(), **counts, "stale": self.stale, "last": self.last()}

    def last(self) -> dict[str, int]:
        last = Counter(self._last)
        return {why: last[why] for why in WHYS if last[why]}

    def summary(self) -> str:
        last = Counter(self._last)
        handed = last.pop("handed_off", 0)
        local = ", ".join(f"{why.replace('_', ' ')} {last[why]}" for why in WHYS if last[why])
        text = f"{handed} of the last {len(self._last)} handed off, {sum(last.values())} local"
        return f"{text}: {local}" if local else text


class Choosable(Protocol):
    """The engines to choose from: `EnginePool`, or modelled ones (`benchmarks.serving.goodput`)."""

    pairs: Pairs

    def usable(self, healthy: bool) -> list[PooledEngine]:
        """The healthy ones, or else the suspected ones."""


class Routes:
    """`max_local_prefill_length`: see `RouterConfig`. `hand_backs` None: prefill engines compute what they lack."""

    def __init__(
        self,
        engines: Choosable,
        policies: Policies,
        max_local_prefill_length: int = 0,
        hand_backs: HandBacks | None = None,
    ) -> None:
        self._all, self._policies = engines, policies
        self._max_local = max_local_prefill_length
        self._hand_backs = hand_backs
        hands_back = hand_backs is not None and hand_backs.enabled
        self._learns = bool(max_local_prefill_length) or policies.uses_prefixes or hands_back

    @property
    def config(self) -> PolicyConfig:
        return self._policies.config

    def choose(
        self,
        request: GenerateRequest,
        tried: Sequence[PooledEngine],
        hand_off: bool,
        session: str | None = None,
        refused: Sequence[PooledEngine] = (),
    ) -> Route | None:
        """A route over healthy engines, else suspected ones, else None. Engines in `tried` are a last choice for their
        role, those in `refused` none. `hand_off`: even if the decode engine holds the prompt. `session`: the
        conversation id.

        Raises `OverloadedError` if all engines of a needed role are overloaded, except for a resumed request.
        """
        prompt = prompt_of(request)
        for healthy in (True, False):
            usable = self._all.usable(healthy)
            mine: dict[Role, list[PooledEngine]] = {"prefill": [], "decode": [], "both": []}
            for engine in usable:
                if engine.may_serve(request) and engine not in refused:
                    mine[engine.role].append(engine)
            if tried:
                mine = {role: [e for e in able if e not in tried] or able for role, able in mine.items()}
            engines = _Engines(**mine, forced=bool(tried) or request.num_known > 0)
            backs = self._hand_backs if self._hand_backs is not None and self._hand_backs.enabled else None
            elsewhere = backs.held(prompt, usable) if backs else 0
            route = self._choose_route(request, EngineNeeds(prompt, session, elsewhere=elsewhere), engines, hand_off)
            if route is not None:
                back = None if route.prefill is None or backs is None else backs.choose(prompt, route.prefill, usable)
                return self._charged(route, back, prompt)
        return None

    def _choose_route(
        self, request: GenerateRequest, needs: EngineNeeds, engines: _Engines, hand_off: bool
    ) -> Route | None:
        take, prefill, decode, both = self._choose_engine, engines.prefill, engines.decode, engines.both
        if request.sampling_params.prompt_logprobs is not None and (engines_of_role := prefill or both or decode):
            # One engine must compute the whole prompt.
            return Route("scored", take(needs, engines.free(engines_of_role)))
        why_not = self._all.pairs.why_not
        fitting = [d for d in decode if not all(why_not(p, d) for p in prefill)]
        if prefill and fitting:
            free = engines.free(fitting)
            chosen = take(replace(needs, receives=True), free)
            prefill = [engine for engine in prefill if not why_not(engine, chosen)]
            local = None if hand_off or not self._max_local else self._local(needs, free, chosen, prefill)
            return local or Route("handed_off", chosen, take(replace(needs, decodes=False), engines.free(prefill)))
        if both:
            return Route("both_roles", take(needs, engines.free(both)))
        if decode:
            return Route("no_prefill_engine", take(needs, engines.free(decode)))
        return Route("no_decode_engine", take(needs, engines.free(prefill))) if prefill else None

    def _choose_engine(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        return self._policies.of(among[0].role).choose(needs, among)

    def _local(
        self, needs: EngineNeeds, decode: Sequence[PooledEngine], chosen: PooledEngine, prefill: Sequence[PooledEngine]
    ) -> Route | None:
        if len(needs.prompt.tokens) <= self._max_local:
            return Route("short", chosen)
        limit = max(self._max_local, self._turn_limit(needs, prefill))
        config, held = self._policies.config, [engine for engine in decode if needs.uncached(engine) <= limit]
        if not held:
            return None
        handoff = cost(replace(needs, receives=True), chosen, config)
        handoff += min(cost(replace(needs, decodes=False), engine, config) for engine in prefill)
        best = min(held, key=lambda engine: (cost(needs, engine, config), engine is not chosen, engine.order))
        is_near = best.all_inflight <= chosen.all_inflight + _SLACK_LEGS
        if not is_near and cost(needs, best, config) > handoff:
            return None
        return Route("cached", best, max_prefill_tokens=limit)

    def _turn_limit(self, needs: EngineNeeds, prefill: Sequence[PooledEngine]) -> int:
        """The most tokens of a prompt that a decode engine may compute because prefill engines, lacking earlier
        answers, would compute many more.
        """
        config = self._policies.config
        if not config.max_turn_prefill_length:
            return 0
        least = min(
            needs.uncached(engine) - needs.handed_back(engine, config) + engine.all_queued_tokens for engine in prefill
        )
        limit = min(config.max_turn_prefill_length, int(least / config.turn_ratio))
        return limit if limit < len(needs.prompt.tokens) else 0

    def _charged(self, route: Route, back: HandBack | None, prompt: PromptBlocks) -> Route:
        """The computing engine will hold the prompt: count it for the next request."""
        tokens, computes = len(prompt.tokens), route.prefill or route.decode
        held = computes.known.num_tokens(prompt) + (0 if back is None else back.num_tokens)
        charge = Charge(tokens - held, tokens)
        if route.prefill is None:
            return replace(route, charges={"decode": charge}, prompt=prompt)
        if self._learns:
            route.prefill.known.learn(prompt)
        charges: dict[LegRole, Charge] = {"prefill": charge, "decode": Charge(0, tokens)}
        return replace(route, hand_back=back, charges=charges, prompt=prompt)

    def served(self, route: Route, request: GenerateRequest, output: Sequence[int]) -> None:
        """The decode engine now holds the KV of the request and its `output`, except for the last token."""
        if self._learns and route.decode.known.learns:
            prompt = route.prompt or prompt_of(request)
            num_known = len(prompt.tokens) - len(request.prompt_token_ids)
            route.decode.known.learn(prompt.followed_by(output[num_known:-1]))

    def declined(self, route: Route, request: GenerateRequest) -> None:
        route.decode.known.forget(prompt_of(request))


class _Engines(msgspec.Struct, frozen=True):
    """The engines that can take a request, by role. `forced`: overloaded ones too."""

    prefill: list[PooledEngine]
    decode: list[PooledEngine]
    both: list[PooledEngine]
    forced: bool

    def free(self, engines: list[PooledEngine]) -> list[PooledEngine]:
        """Raises `OverloadedError` if all are overloaded."""
        free = [engine for engine in engines if not engine.overloaded]
        if not free and not self.forced:
            raise OverloadedError(f"all {engines[0].role} engines are overloaded; try again later")
        return free or engines
