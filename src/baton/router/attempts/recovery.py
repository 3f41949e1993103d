"""What follows a failed attempt: another attempt, or the request's error (docs/lifecycle.md)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from baton.error_help import OTHER_TICKET_KEY
from baton.errors import (
    BatonError,
    EngineLostError,
    HandoffError,
    LegRefusedError,
    OverloadedError,
    RequestError,
)
from baton.event_loop import timeout
from baton.router.attempts.attempt import RequestProgress
from baton.router.attempts.join import Joined, LegFailed, TokenMismatch
from baton.router.clients.engine_client import EngineClient
from baton.router.connectors.base import Connector
from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine
from baton.router.routes import PREFIX_MISSING, Decisions, Route, Routes
from baton.sampling_params import MAX_LOGPROBS, SamplingParams
from baton.wire import GenerateRequest, Recovery, allows_recovery

logger = logging.getLogger(__name__)

# Without a new token. Few, since a request may crash every engine.
MAX_ATTEMPTS = 3
OnRecovery = Callable[[str, Recovery, LegFailed], None]  # request id, rung, failure


class AttemptRecovery:
    """Prepares a request's next attempt in its `RequestProgress`, or ends it, as far as `allowed` goes. `counts`:
    recoveries by rung.

    `near_tie`: in nats (docs/router.md, "First tokens over vLLM").
    """

    def __init__(
        self,
        pool: EnginePool,
        connector: Connector,
        routes: Routes,
        decisions: Decisions,
        on_recovery: OnRecovery,
        allowed: Recovery = "full",
        near_tie: float = 0.0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.near_ties = 0
        self._pool, self._connector = pool, connector
        self._routes, self._decisions = routes, decisions
        self._on_recovery = on_recovery
        self._allowed: Recovery = allowed
        self._near_tie = near_tie

    async def after_mismatch(self, progress: RequestProgress, route: Route, mismatch: TokenMismatch) -> bool:
        """Returns False if the request ends with `mismatch`."""
        if route.prefill is None or not await self._is_near_tie(progress.joined, mismatch, route.prefill):
            progress.ended.append(mismatch)
            return False
        self.near_ties += 1
        progress.attempt += 1
        progress.route = Route("resumed", route.decode)
        return True

    async def after_failure(
        self, progress: RequestProgress, route: Route, request: GenerateRequest, failed: LegFailed, num_known: int
    ) -> None:
        """`request`: the failed attempt's. `num_known`: output tokens when it began."""
        if failed.reported and await self._pool.has_died(route.decode):
            failed = LegFailed("decode", EngineLostError(str(failed.error)))
        error = failed.error
        progress.attempt += 1
        progress.route = None
        if isinstance(error, HandoffError) and error.reason == PREFIX_MISSING and not progress.hand_off:
            self._decisions.stale += 1
            self._routes.declined(route, request)
            progress.hand_off = True
            return
        lost = _blamed_engine(route, failed)
        # Another engine may have room. Resumed requests are never refused for overload.
        is_full = isinstance(error, OverloadedError) and not progress.joined.token_ids
        if is_full and not self._pool.has_other(lost, progress.tried):
            progress.ended.append(error)
            return
        await self._examine(lost, error)
        if not is_full:
            progress.fruitless = 1 if len(progress.joined.token_ids) > num_known else progress.fruitless + 1
        rung = self._rung(progress, failed)
        if rung is None:
            progress.ended.append(error)
            return
        self._count(progress.joined, rung, failed)
        self._avoid(progress, lost, error, num_known)

    def may_move(self, progress: RequestProgress, request: GenerateRequest, engine: PooledEngine) -> bool:
        """Whether to leave a silent engine at once. The last attempt waits instead."""
        if progress.joined.token_ids or progress.fruitless + 1 >= MAX_ATTEMPTS:
            return False
        if not allows_recovery(self._allowed, "retry"):
            return False
        return any(other.may_serve(request) for other in self._pool.usable(healthy=True) if other is not engine)

    async def _examine(self, engine: PooledEngine, error: BatonError) -> None:
        """Ask what it serves now, unless it is full or known to be silent."""
        if isinstance(error, LegRefusedError) and error.code == OTHER_TICKET_KEY:
            self._pool.bar(engine)
        if not isinstance(error, OverloadedError) and not (engine.evicted or engine.suspected):
            await self._pool.refresh(engine)

    def _rung(self, progress: RequestProgress, failed: LegFailed) -> Recovery | None:
        """None: no other attempt can succeed, or may be made."""
        tokens, params = progress.joined.token_ids, progress.joined.request.sampling_params
        rung = _needed_rung(failed, bool(tokens))
        if rung is None or not allows_recovery(self._allowed, rung) or progress.fruitless >= MAX_ATTEMPTS:
            return None
        return None if tokens and not self._connector.can_resume(params) else rung

    def _count(self, joined: Joined, rung: Recovery, failed: LegFailed) -> None:
        request_id = joined.request.request_id
        self.counts[rung] += 1
        self._on_recovery(request_id, rung, failed)
        logger.warning("%s: going on from %d tokens: %s", request_id, len(joined.token_ids), failed)

    def _avoid(self, progress: RequestProgress, lost: PooledEngine, error: BatonError, num_known: int) -> None:
        progress.tried.append(lost)
        if isinstance(error, HandoffError) and error.reason == "incompatible_peer":
            progress.trusted = num_known if progress.trusted is None else progress.trusted
        if isinstance(error, LegRefusedError) and self._connector.computes_alone:
            progress.refused.append(lost)

    async def _is_near_tie(self, joined: Joined, mismatch: TokenMismatch, prefill: PooledEngine) -> bool:
        if self._near_tie <= 0.0:
            return False
        with contextlib.suppress(BatonError, asyncio.TimeoutError):
            async with timeout(self._pool.timers.tell):
                gap = await measure_gap(prefill.client, joined, mismatch)
            logger.warning("%s: %s, %s nats apart", joined.request.request_id, mismatch, gap)
            return gap is not None and gap <= self._near_tie
        return False


def _blamed_engine(route: Route, failed: LegFailed) -> PooledEngine:
    """A decode engine that reports an error is healthy: the prefill engine failed."""
    blamed = route.prefill if failed.leg == "prefill" or failed.reported else None
    return blamed or route.decode


def _needed_rung(failed: LegFailed, any_sent: bool) -> Recovery | None:
    if isinstance(failed.error, RequestError):
        return None
    if failed.reported:
        return "source"
    if not any_sent:
        return "retry"
    return "full" if isinstance(failed.error, EngineLostError) else "source"


async def measure_gap(client: EngineClient, joined: Joined, mismatch: TokenMismatch) -> float | None:
    """The gap in nats between the logprobs of a mismatch's two tokens, as `client`'s engine computes them. None if it
    proves nothing: the token was drawn or biased, or one of them is not among the `MAX_LOGPROBS` most likely.

    Raises the errors of the engine's leg.
    """
    params = joined.request.sampling_params
    if not _is_plain(params):
        return None
    before = joined.token_ids[: mismatch.position]
    probe = GenerateRequest(
        request_id=f"{joined.request.request_id}.tie{mismatch.position}",
        prompt_token_ids=joined.request.prompt_token_ids + before,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True),
        adapter=joined.request.adapter,
    )
    logprobs: dict[int, float] = {}
    async for chunk in client.generate(probe):
        for token in chunk.logprobs or ():
            logprobs |= dict(token.top)
    if mismatch.sent not in logprobs or mismatch.said not in logprobs:
        return None
    return abs(logprobs[mismatch.sent] - logprobs[mismatch.said])


def _is_plain(params: SamplingParams) -> bool:
    plain = SamplingParams(temperature=0.0)
    return params.structured_outputs is None and all(
        getattr(params, name) == getattr(plain, name)
        for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    )
