"""Hand-back of cached KV to prefill engines (docs/router.md, "Hand-back")."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from baton.errors import BatonError, EngineUnavailableError, HandoffError, reason_label
from baton.event_loop import timeout
from baton.observe.pace import TokenPace
from baton.openai.http.api_errors import error_of_chunk
from baton.openai.http.metrics import Row, counter
from baton.router.connectors.base import Connector, PrefixLeg
from baton.router.leg_tasks import Chunks, LegWatch
from baton.router.policies import PolicyConfig
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import PromptBlocks, prompt_of
from baton.wire import GenerateRequest, Mode, TokenChunk

# A pair that was too slow is tried again after this many prompts.
_TRY_AGAIN = 16
# Moves between two engines before they are judged, with the first, which connects: one may wait for a busy source.
_JUDGED_MOVES = 4
# Fewer computed tokens are not measured.
_MEASURED_TOKENS = 16
# The shortest limit of a prefill leg's wait, for a pair that was measured.
_LEAST_LIMIT_S = 0.25


@dataclass(frozen=True, slots=True)
class HandBack:
    """`source` probably holds `num_tokens` more tokens of a prompt than the prefill engine, which holds `held`."""

    source: PooledEngine
    num_tokens: int
    held: int = 0


class HandBacks:
    """Hands prefixes back if moving is faster than computing.

    `counts`: by outcome; `too_slow`: computing is faster. `num_tokens`: that prefill engines did not compute.
    """

    OUTCOMES = ("completed", "failed", "too_slow")

    def __init__(self, connector: Connector, config: PolicyConfig) -> None:
        self._connector, self._config = connector, config
        self._always = config.min_hand_back_length == 0
        self.enabled = config.hand_back and connector.moves_prefixes
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.num_tokens = 0
        self._moving: WeakKeyDictionary[PooledEngine, WeakKeyDictionary[PooledEngine, TokenPace]] = WeakKeyDictionary()
        self._computing: WeakKeyDictionary[PooledEngine, TokenPace] = WeakKeyDictionary()

    def choose(self, prompt: PromptBlocks, prefill: PooledEngine, engines: Sequence[PooledEngine]) -> HandBack | None:
        """None if hand-back does not pay."""
        others = [engine for engine in self._sources(engines) if engine is not prefill]
        if not others:
            return None
        most, best = max(((engine.known.num_tokens(prompt), engine) for engine in others), key=lambda found: found[0])
        held = prefill.known.num_tokens(prompt)
        gain = most - held
        if gain < max(1, self._config.min_hand_back_length):
            return None
        pace = self._pace_of(best, prefill)
        moving, computing = pace.predict(gain), self._saved_s(prefill, len(prompt.tokens) - held, gain)
        if not self._always and moving is not None and computing is not None and moving >= computing:
            pace.num_passed_over += 1
            if pace.num_passed_over % _TRY_AGAIN:
                self.counts["too_slow"] += 1
                return None
        return HandBack(best, gain, held)

    def held(self, prompt: PromptBlocks, engines: Sequence[PooledEngine]) -> int:
        """The most tokens of the prompt that any engine can hand back."""
        return max((engine.known.num_tokens(prompt) for engine in self._sources(engines)), default=0)

    def _sources(self, engines: Sequence[PooledEngine]) -> list[PooledEngine]:
        """Excludes engines that still compute the prompt."""
        return [engine for engine in engines if not engine.queued_tokens] if self.enabled else []

    def _saved_s(self, engine: PooledEngine, num_lacking: int, gain: int) -> float | None:
        """Seconds saved on computing `num_lacking` tokens if `gain` of them are moved instead."""
        pace = self._compute_pace(engine)
        whole, rest = pace.predict(num_lacking), pace.predict(num_lacking - gain)
        return None if whole is None or rest is None else whole - rest

    def _pace_of(self, source: PooledEngine, destination: PooledEngine) -> TokenPace:
        moving = self._moving.setdefault(source, WeakKeyDictionary())
        return moving.setdefault(destination, TokenPace(_JUDGED_MOVES))

    def _compute_pace(self, engine: PooledEngine) -> TokenPace:
        return self._computing.setdefault(engine, TokenPace())

    async def run(
        self,
        request: GenerateRequest,
        prefill: PooledEngine,
        back: HandBack,
        mode: Mode,
        drain: Callable[[Chunks], None],
    ) -> None:
        """Never raises: on failure the prefill engine computes the tokens. `drain` reads a leg to its end."""
        now = asyncio.get_running_loop().time
        began, num_lacking = now(), len(request.prompt_token_ids) - back.held
        computing = self._saved_s(prefill, num_lacking, back.num_tokens)
        limit_s = self._config.hand_back_limit_s
        if not self._always and computing is not None and self._pace_of(back.source, prefill).num_measured > 1:
            limit_s = min(limit_s, max(_LEAST_LIMIT_S, 4.0 * computing))
        try:
            async with timeout(limit_s):
                expected = back.held + back.num_tokens
                leg = self._connector.prefix_leg(request, back.source, prefill, mode, expected)
                arrived = await self._move(leg, len(request.prompt_token_ids), back.held, drain)
        except HandoffError as error:
            self._failed(reason_label(error.reason))
            if error.reason == "prefix_missing":
                back.source.known.forget(prompt_of(request))
        except BatonError as error:
            self._failed(type(error).__name__)
        except asyncio.TimeoutError:
            self._failed("timeout")
            self._pace_of(back.source, prefill).measure(now() - began, back.num_tokens)
        else:
            num_tokens = arrived.num_cached_tokens - back.held
            self.counts["completed"] += 1
            self.num_tokens += num_tokens
            # Steps of other requests would have delayed the prompt as well.
            seconds = max(now() - began - (arrived.queued_s or 0.0), 0.0)
            self._pace_of(back.source, prefill).measure(seconds, max(1, num_tokens))

    def on_first_token(
        self, request: GenerateRequest, prefill: PooledEngine, first: TokenChunk, seconds: float
    ) -> None:
        """`seconds`: from the prefill leg's request to its first token."""
        num_computed = len(request.prompt_token_ids) - first.num_cached_tokens
        if num_computed >= _MEASURED_TOKENS:
            self._compute_pace(prefill).measure(max(seconds - (first.queued_s or 0.0), 0.0), num_computed)

    async def _move(self, leg: PrefixLeg, num_prompt: int, held: int, drain: Callable[[Chunks], None]) -> TokenChunk:
        """Returns the destination's last chunk."""
        source = leg("prefill", num_prompt - 1, 0, num_prompt - held - max(1, self._config.min_hand_back_length))
        ended = False
        try:
            offer = await source.__anext__()
            if offer.finish_reason is not None:
                ended = True
                raise error_of_chunk(offer.error)
            arrived: TokenChunk | None = None
            async with contextlib.aclosing(leg("decode", offer.num_cached_tokens, offer.window_start, None)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason not in ("length", None):
                        raise error_of_chunk(chunk.error)
                    arrived = chunk
            ended = True
            drain(source)  # it ends when the source's pages are free
            if arrived is None:
                raise EngineUnavailableError("the destination ended its leg without an answer")
            return arrived
        except StopAsyncIteration:
            raise EngineUnavailableError("the source ended its leg without an answer") from None
        finally:
            if not ended:
                await source.aclose()

    def _failed(self, reason: str) -> None:
        self.counts["failed"] += 1
        self.failures[reason] += 1

    def describe(self) -> dict[str, object]:
        """For `/status`."""
        pairs = {
            f"{source.name} to {destination.name}": round(1.0 / pace.per_token)
            for source, moving in self._moving.items()
            for destination, pace in moving.items()
            if pace.per_token
        }
        computing = self._computing.items()
        computed = {engine.name: round(1.0 / pace.per_token) for engine, pace in computing if pace.per_token}
        return {
            **{outcome: self.counts[outcome] for outcome in self.OUTCOMES},
            "failures": dict(self.failures),
            "num_tokens": self.num_tokens,
            "moved_tokens_per_s": pairs,
            "computed_tokens_per_s": computed,
        }

    def rows(self) -> Iterator[Row]:
        """For `/metrics`."""
        for outcome in self.OUTCOMES:
            text = "Prefixes handed back to prefill engines, by outcome."
            yield counter("router_hand_backs", text, self.counts[outcome], outcome=outcome)
        text = "Prompt tokens that prefill engines got from other engines' caches."
        yield counter("router_handed_back_tokens", text, self.num_tokens)


@dataclass(slots=True)
class HandBackWatch(LegWatch):
    """Watches a prefill leg: runs the hand-back `back` first, and measures how fast the rest is computed."""

    hand_backs: HandBacks
    request: GenerateRequest
    prefill: PooledEngine
    back: HandBack | None
    mode: Mode
    drain: Callable[[Chunks], None]
    _began: float | None = None

    async def begin(self) -> None:
        if self.back is not None:
            await self.hand_backs.run(self.request, self.prefill, self.back, self.mode, self.drain)
        self._began = asyncio.get_running_loop().time()

    def on_chunk(self, chunk: TokenChunk) -> None:
        if self._began is not None and chunk.token_ids:
            seconds = asyncio.get_running_loop().time() - self._began
            self.hand_backs.on_first_token(self.request, self.prefill, chunk, seconds)
            self._began = None
