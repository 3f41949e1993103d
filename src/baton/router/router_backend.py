"""The router's backend: routes requests, runs their legs, joins the tokens and recovers from failures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, get_args

import msgspec

from baton.error_help import OTHER_TICKET_KEY, code_of
from baton.errors import (
    BatonError,
    EngineLostError,
    EngineUnavailableError,
    HandoffError,
    LegRefusedError,
    OverloadedError,
    ProtocolError,
    RequestError,
    reason_label,
)
from baton.openai import ServedModel
from baton.openai.backend import OnRoute, Take
from baton.openai.http.caller import CALLER, session_of
from baton.router.admission.tenants import standing_of
from baton.router.attempt import RequestProgress, RunningAttempt, pass_on
from baton.router.concurrency import ConcurrencyLimit
from baton.router.connectors.base import Connector, HandoffOutcome, Legs
from baton.router.hand_back import HandBacks, HandBackWatch
from baton.router.join import Joined, LegFailed, TokenMismatch, join_legs
from baton.router.leg_tasks import Chunks, LegItems, frameless
from baton.router.near_tie import measure_gap
from baton.router.observer import RequestObserver
from baton.router.policies import PolicyConfig, create_policies
from baton.router.pool import EnginePool
from baton.router.pooled_engine import NO_CHARGE, OnLost, PooledEngine
from baton.router.routes import PREFIX_MISSING, Decisions, Route, Routes
from baton.sampling_params import SamplingParams
from baton.timeouts import timeout
from baton.wire import GenerateRequest, LegRole, Mode, Recovery, TokenChunk, allows_recovery

logger = logging.getLogger(__name__)

# In a row without a new token, since a request may crash every engine.
MAX_ATTEMPTS = 3
_PATIENCE_STEP_S = 0.1
MayMove = Callable[[PooledEngine], bool]


class RouterBackend:
    """A failed attempt is followed by another that continues the client's tokens, as far as `recovery` allows
    (docs/lifecycle.md). `handoffs` counts attempts by outcome: `finished_early` (the first token was the last),
    `aborted` (a stop string was found, the client left, the request was refused, or tokens did not match), `failed` (by
    reason in `failures`). `recoveries` counts by rung. `observer` may be replaced before the first request.

    If two engines sample different tokens, the client keeps the one it has. At a near-tie (at most `near_tie` nats) the
    decode engine continues from there; otherwise the request fails.
    """

    OUTCOMES: tuple[str, ...] = ("started", *get_args(HandoffOutcome))

    def __init__(
        self,
        pool: EnginePool,
        connector: Connector,
        kv_mode: Mode = "push",
        allow_mode_override: bool = False,
        recovery: Recovery = "full",
        near_tie: float = 0.0,
        routes: Routes | None = None,
        hand_backs: HandBacks | None = None,
    ) -> None:
        """`routes` None: the default policies, and decode engines compute no whole prompt."""
        self.pool = pool
        self.decisions = Decisions()
        self.hand_backs = hand_backs or HandBacks(connector, PolicyConfig())
        self._routes = routes or Routes(pool, create_policies())
        self.concurrency = ConcurrencyLimit(pool.max_num_seqs, self._routes.config.tenants, pool.loads)
        self.allows_kv_mode = allow_mode_override
        self.handoffs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.observer = RequestObserver()
        self.near_ties = 0
        self.num_active_handoffs = 0
        self._connector = connector
        self._kv_mode: Mode = kv_mode
        self._recovery: Recovery = recovery
        self._near_tie = near_tie
        self._background: set[asyncio.Task[None]] = set()

    def model(self) -> ServedModel:
        return self.pool.identity.model()

    def check(self, params: SamplingParams) -> None:
        self._connector.check(params)

    async def generate(
        self,
        request: GenerateRequest,
        kv_mode: Mode | None = None,
        on_route: OnRoute | None = None,
        take: Take | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Wait for a slot, then yield the request's chunks over all attempts. Raises the last attempt's error."""
        with self.observer.observing(request) as observed:
            self.pool.identity.bind()
            now = asyncio.get_running_loop().time
            standing = standing_of(CALLER.get(), request, self.concurrency.tenants, now())
            ranked = msgspec.structs.replace(observed.request, priority=standing.priority)
            progress = RequestProgress(Joined(ranked), hand_off=kv_mode is not None)
            joined = progress.joined
            async with self.concurrency.slot(standing, joined.token_ids):
                began = now()
                while True:
                    rest = joined.rest(progress.attempt, now() - began, progress.trusted)
                    route = await self._next_route(progress, rest)
                    names = route.names
                    observed.on_route(route.why, names)
                    if on_route is not None:
                        on_route(route.why, names)
                    num_known = len(joined.token_ids)
                    try:
                        may_move = functools.partial(self._may_move, joined, rest, progress.fruitless)
                        items = LegItems(None if take is None else functools.partial(pass_on, take, joined, observed))
                        async with self._running(rest, route, kv_mode or self._kv_mode, may_move, items) as attempt:
                            async for chunk, leg in attempt.chunks:
                                attempt.note(chunk, leg)
                                if not progress.decided:  # the engine may still decline
                                    progress.decided = True
                                    self.decisions.took(route.why)
                                new = joined.push(chunk)
                                if new is not None:
                                    observed.on_chunk(new)
                                    yield new
                        return
                    except TokenMismatch as mismatch:
                        await self._resolve_mismatch(progress, route, frameless(mismatch))
                    except LegFailed as failed:
                        await self._recover(progress, route, rest, frameless(failed), num_known)
                    except ProtocolError as error:
                        await self._recover(progress, route, rest, LegFailed("decode", frameless(error)), num_known)
                    finally:
                        if len(joined.token_ids) > max(num_known, 1):  # the decode engine has added tokens
                            self._routes.served(route, request, joined.token_ids)
                    if progress.ended:
                        raise progress.ended.pop()

    async def _next_route(self, progress: RequestProgress, rest: GenerateRequest) -> Route:
        """Counts the route as a decision unless its engine may still decline."""
        route, again = progress.route, progress.decided
        if route is None:
            patience_s = self.pool.timers.patience if progress.attempt else 0.0
            route = await self._choose(rest, progress, patience_s)
        if again:
            self.decisions.took_again(route.why)
        elif route.max_prefill_tokens is None:
            progress.decided = True
            self.decisions.took(route.why)
        return route

    async def _resolve_mismatch(self, progress: RequestProgress, route: Route, mismatch: TokenMismatch) -> None:
        """At a near-tie, let the decode engine continue from the client's tokens, else end with `mismatch`."""
        if route.prefill is None or not await self._is_near_tie(progress.joined, mismatch, route.prefill):
            self.failures[mismatch.reason] += 1
            progress.ended.append(mismatch)
            return
        self.near_ties += 1
        progress.attempt += 1
        progress.route = Route("resumed", route.decode)

    async def _recover(
        self, progress: RequestProgress, route: Route, rest: GenerateRequest, failed: LegFailed, num_known: int
    ) -> None:
        """Prepare another attempt, or end with the failed one's error. `num_known`: output tokens when it began."""
        if failed.reported and await self.pool.has_died(route.decode):
            failed = LegFailed("decode", EngineLostError(str(failed.error)))
        joined, error = progress.joined, failed.error
        progress.attempt += 1
        progress.route = None
        if isinstance(error, HandoffError) and error.reason == PREFIX_MISSING and not progress.hand_off:
            self.decisions.stale += 1
            self._routes.declined(route, rest)
            progress.hand_off = True
            return
        # A decode engine that reports an error is healthy: the prefill engine failed.
        blamed = route.prefill if failed.leg == "prefill" or failed.reported else None
        lost = blamed or route.decode
        if isinstance(error, LegRefusedError) and error.code == OTHER_TICKET_KEY:
            self.pool.bar(lost)
        # Another engine of the role may have room. Resumed requests are never refused for overload.
        full = isinstance(error, OverloadedError) and not joined.token_ids
        if full and not self.pool.has_other(lost, progress.tried):
            progress.ended.append(error)
            return
        if not isinstance(error, OverloadedError) and not (lost.evicted or lost.suspected):
            await self.pool.refresh(lost)
        if not full:
            progress.fruitless = 1 if len(joined.token_ids) > num_known else progress.fruitless + 1
        rung = _next_recovery(failed, bool(joined.token_ids))
        over = progress.fruitless >= MAX_ATTEMPTS
        if joined.token_ids:
            over |= not self._connector.can_resume(joined.request.sampling_params)
        if over or rung is None or not allows_recovery(self._recovery, rung):
            progress.ended.append(error)
            return
        self.recoveries[rung] += 1
        self.observer.on_recovery(joined.request.request_id, rung, failed)
        logger.warning("%s: going on from %d tokens: %s", joined.request.request_id, len(joined.token_ids), failed)
        progress.tried.append(lost)
        if isinstance(error, HandoffError) and error.reason == "incompatible_peer":
            progress.trusted = num_known if progress.trusted is None else progress.trusted
        if isinstance(error, LegRefusedError) and self._connector.computes_alone:
            progress.refused.append(lost)

    def ready(self) -> bool:
        return bool(self.pool.usable(healthy=True))

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _choose(self, request: GenerateRequest, progress: RequestProgress, patience_s: float) -> Route:
        """Waits up to `patience_s`. Raises `EngineUnavailableError`."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            self.pool.read_loads()
            tried, hand_off, session = progress.tried, progress.hand_off, session_of(CALLER.get())
            for refused in (progress.refused, ()):
                route = self._routes.choose(request, tried, hand_off, session, refused)
                if route is not None:
                    return route
            if asyncio.get_running_loop().time() >= deadline:
                problems = [f"{e.url}: {e.problem}" for e in self.pool.engines if e.problem is not None]
                problems += [
                    f"{e.url}: serves something else than what the request began with"
                    for e in self.pool.engines
                    if e.problem is None and not e.may_serve(request)
                ]
                raise EngineUnavailableError("; ".join(["no engine can take the request now", *problems]))
            await asyncio.sleep(_PATIENCE_STEP_S)

    def _may_move(self, joined: Joined, request: GenerateRequest, fruitless: int, engine: PooledEngine) -> bool:
        """Whether to leave a silent engine at once. The last attempt waits instead."""
        if joined.token_ids or fruitless + 1 >= MAX_ATTEMPTS or not allows_recovery(self._recovery, "retry"):
            return False
        return any(other.may_serve(request) for other in self.pool.usable(healthy=True) if other is not engine)

    def _running(
        self, request: GenerateRequest, route: Route, kv_mode: Mode, may_move: MayMove, items: LegItems
    ) -> RunningAttempt:
        """Raises `LegFailed` if another may succeed."""
        prefill, decode = route.prefill, route.decode
        if prefill is None:
            if route.max_prefill_tokens is not None:
                request = msgspec.structs.replace(request, max_prefill_tokens=route.max_prefill_tokens)
            alone = Legs({"decode": self._connector.alone(request, decode)})
            return self._joining(request, route, alone, kv_mode, may_move, items)
        legs = self._connector.legs(request, prefill, decode, kv_mode)
        attempt = self._joining(request, route, legs, kv_mode, may_move, items)
        attempt.failures, attempt.ended = self.failures, functools.partial(self._handoff_ended, legs)
        attempt.on_failure = functools.partial(self.pool.pairs.note, prefill, decode)
        self.handoffs["started"] += 1
        self.num_active_handoffs += 1
        return attempt

    def _handoff_ended(self, legs: Legs, outcome: HandoffOutcome, error: BaseException | None) -> None:
        if isinstance(error, LegFailed) and outcome != "failed" and not isinstance(error.error, RequestError):
            outcome, cause = "failed", error.error
            self.failures[reason_label(cause.reason) if isinstance(cause, HandoffError) else code_of(cause)] += 1
        self.num_active_handoffs -= 1
        self.handoffs[outcome] += 1
        if legs.on_end is not None and (telling := legs.on_end(outcome)) is not None:
            self._run_in_background(telling, self.pool.timers.tell)

    def _joining(
        self, request: GenerateRequest, route: Route, legs: Legs, kv_mode: Mode, may_move: MayMove, items: LegItems
    ) -> RunningAttempt:
        engines = {leg: route.engine(leg) for leg in legs.chunks}
        watches = self.observer.watch_legs(request.request_id, engines, kv_mode)
        if self.hand_backs.enabled and "prefill" in engines:
            prefill = engines["prefill"]
            back = HandBackWatch(self.hand_backs, request, prefill, route.hand_back, kv_mode, self._drain)
            watches["prefill"].append(back)

        def on_lost(leg: LegRole) -> OnLost:
            return lambda error: items.put_nowait((leg, error))

        counted = [
            engine.leg(on_lost(leg), functools.partial(may_move, engine), route.charges.get(leg, NO_CHARGE))
            for leg, engine in engines.items()
        ]
        joined = join_legs(legs.chunks, items, self._drain, legs.notices, legs.first_token_wait_s, watches)
        return RunningAttempt(joined, counted)

    async def _is_near_tie(self, joined: Joined, mismatch: TokenMismatch, prefill: PooledEngine) -> bool:
        if self._near_tie <= 0.0:
            return False
        with contextlib.suppress(BatonError, asyncio.TimeoutError):
            async with timeout(self.pool.timers.tell):
                gap = await measure_gap(prefill.client, joined, mismatch)
            logger.warning("%s: %s, %s nats apart", joined.request.request_id, mismatch, gap)
            return gap is not None and gap <= self._near_tie
        return False

    def _drain(self, leg: Chunks) -> None:
        """In the background: closing the leg would abort it."""

        async def drain() -> None:
            async with contextlib.aclosing(leg):
                await _exhaust(leg)

        self._run_in_background(drain(), self.pool.timers.drain)

    def _run_in_background(self, work: Coroutine[Any, Any, object], limit_s: float) -> None:
        """Ignores failures and timeouts."""

        async def bounded() -> None:
            with contextlib.suppress(BatonError, asyncio.TimeoutError):
                async with timeout(limit_s):
                    await work

        task = asyncio.create_task(bounded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda _: work.close())  # it may not have begun


def _next_recovery(failed: LegFailed, any_sent: bool) -> Recovery | None:
    """None: no other attempt can succeed."""
    if isinstance(failed.error, RequestError):
        return None
    if failed.reported:
        return "source"
    if not any_sent:
        return "retry"
    return "full" if isinstance(failed.error, EngineLostError) else "source"


async def _exhaust(leg: Chunks) -> None:
    async for _ in leg:
        pass
