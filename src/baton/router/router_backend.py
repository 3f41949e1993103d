"""The router's backend: routes requests, runs their legs, joins the tokens and recovers from failures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, get_args

import msgspec

from baton.error_help import code_of
from baton.errors import (
    BatonError,
    EngineUnavailableError,
    HandoffError,
    ProtocolError,
    RequestError,
    reason_label,
)
from baton.event_loop import timeout
from baton.openai import ServedModel
from baton.openai.backend import OnRoute, Take
from baton.openai.http.caller import CALLER, session_of
from baton.router.admission.concurrency import ConcurrencyLimit
from baton.router.admission.tenants import standing_of
from baton.router.attempts.attempt import RequestProgress, RunningAttempt, pass_on
from baton.router.attempts.join import Joined, LegFailed, TokenMismatch, join_legs
from baton.router.attempts.observer import RequestObserver
from baton.router.attempts.recovery import AttemptRecovery
from baton.router.connectors.base import Connector, HandoffOutcome, Legs
from baton.router.hand_back import HandBacks, HandBackWatch
from baton.router.leg_tasks import Chunks, LegItems, frameless
from baton.router.pairs import trial_request
from baton.router.policies import PolicyConfig, create_policies
from baton.router.pool import EnginePool
from baton.router.pooled_engine import NO_CHARGE, OnLost, PooledEngine
from baton.router.routes import Decisions, Route, Routes
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, LegRole, Mode, Recovery, TokenChunk

_PATIENCE_STEP_S = 0.1
MayMove = Callable[[PooledEngine], bool]


class RouterBackend:
    """After a failed attempt another may continue the client's tokens (`recovery`). `handoffs` counts attempts by
    outcome: `finished_early` (the first token was the last), `aborted` (a stop string was found, the client left, the
    request was refused, or tokens did not match), `failed` (by reason in `failures`). `observer` may be replaced before
    the first request.
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
        self.observer = RequestObserver()
        self.recovery = AttemptRecovery(
            pool,
            connector,
            self._routes,
            self.decisions,
            lambda *recovered: self.observer.on_recovery(*recovered),
            recovery,
            near_tie,
        )
        self.num_active_handoffs = 0
        self._connector = connector
        self._kv_mode: Mode = kv_mode
        self._background: set[asyncio.Task[None]] = set()
        pool.on_pair_due = lambda p, d: self._run_in_background(self._try_pair(p, d), pool.timers.tell)

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
                        may_move = functools.partial(self.recovery.may_move, progress, rest)
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
                        if not await self.recovery.after_mismatch(progress, route, frameless(mismatch)):
                            self.failures[mismatch.reason] += 1
                    except LegFailed as failed:
                        await self.recovery.after_failure(progress, route, rest, frameless(failed), num_known)
                    except ProtocolError as error:
                        await self.recovery.after_failure(
                            progress, route, rest, LegFailed("decode", frameless(error)), num_known
                        )
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
            if asyncio.get_running_loop().time() >= deadline or not self.pool.may_recover():
                problems = [f"{e.url}: {e.problem}" for e in self.pool.engines if e.problem is not None]
                problems += [
                    f"{e.url}: serves something else than what the request began with"
                    for e in self.pool.engines
                    if e.problem is None and not e.may_serve(request)
                ]
                raise EngineUnavailableError("; ".join(["no engine can take the request now", *problems]))
            await asyncio.sleep(_PATIENCE_STEP_S)

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

    async def _try_pair(self, prefill: PooledEngine, decode: PooledEngine) -> None:
        """Does a refused pair hand over again? No client waits for it."""
        request = trial_request(self._connector.config.new_transfer_id().hex())
        route = Route("handed_off", decode, prefill)
        with contextlib.suppress(LegFailed):
            async with self._running(request, route, self._kv_mode, lambda _: False, LegItems()) as attempt:
                async for chunk, leg in attempt.chunks:
                    attempt.note(chunk, leg)
                if attempt.outcome == "completed":
                    self.pool.pairs.worked(prefill, decode)

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


async def _exhaust(leg: Chunks) -> None:
    async for _ in leg:
        pass
