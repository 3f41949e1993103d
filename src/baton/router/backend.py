"""Requests through the router: choose engines, mint a ticket, run both legs at once, join their tokens; and go on
with other engines where some were lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator

import msgspec

from baton.errors import BatonError, EngineLostError, EngineUnavailableError, ProtocolError, RequestError
from baton.handoff.ticket import TICKET_LIFE_S, Ticket, mint, new_transfer_id
from baton.openai import ServedModel
from baton.openai.backend import KVMode
from baton.openai.errors import error_of_chunk
from baton.router.join import Chunks, Items, Joined, Leg, LegFailed, join_legs
from baton.router.pool import EnginePool, Instance, OnLost
from baton.wire import GenerateRequest, HandoffParams, Recovery, TokenChunk, recovers

logger = logging.getLogger(__name__)

# In a row, without a new token: an engine that dies under each request it gets must not get it for ever.
MAX_ATTEMPTS = 3
_PATIENCE_STEP_S = 0.1


class RouterBackend:
    """Serves requests over the engines of a pool.

    An attempt that fails is followed by another from the tokens that the client has, as far as `recovery` allows:
    `retry` where there are none yet, `source` where the decode engine asks for it or was never reached, `full` where
    it was lost. `handoffs` counts attempts by outcome: `started`, `completed`, `finished_early` (the first token was
    the last), `aborted` (a stop string was found or the client left), `failed` (by reason in `failures`);
    `recoveries` counts by rung.
    """

    OUTCOMES = ("started", "completed", "finished_early", "aborted", "failed")

    def __init__(
        self,
        pool: EnginePool,
        ticket_key: bytes | None,
        kv_mode: KVMode = "push",
        allow_mode_override: bool = False,
        recovery: Recovery = "full",
    ) -> None:
        self.pool = pool
        self.allows_kv_mode = allow_mode_override
        self.handoffs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.num_active_handoffs = 0
        self._ticket_key = ticket_key
        self._kv_mode: KVMode = kv_mode
        self._recovery: Recovery = recovery
        self._drains: set[asyncio.Task[None]] = set()

    def model(self) -> ServedModel:
        """Return the model all engines serve."""
        return self.pool.model()

    async def generate(
        self, request: GenerateRequest, kv_mode: KVMode | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the request's chunks; see `Backend.generate`."""
        joined = Joined(request)
        tried: list[Instance] = []
        attempt = fruitless = 0
        while True:
            chosen = await self._choose(tried, self.pool.timers.patience if attempt else 0.0)
            num_known = len(joined.token_ids)
            run = self._run(joined.rest(attempt), chosen, kv_mode or self._kv_mode)
            try:
                async with contextlib.aclosing(run) as chunks:
                    async for chunk in chunks:
                        new = joined.push(chunk)
                        if new is not None:
                            yield new
                return
            except LegFailed as failure:
                failed = failure
            except ProtocolError as error:
                failed = LegFailed("decode", error)
            # A decode engine that says why it cannot go on is well; what it misses is the prefill engine's.
            lost = chosen[0] if failed.leg == "prefill" or failed.reported else chosen[-1]
            if not lost.evicted:
                await self.pool.refresh(lost)
            fruitless = 1 if len(joined.token_ids) > num_known else fruitless + 1
            rung = _rung(failed, bool(joined.token_ids))
            if rung is None or not recovers(self._recovery, rung) or fruitless >= MAX_ATTEMPTS:
                raise failed.error
            attempt += 1
            self.recoveries[rung] += 1
            logger.warning("%s: going on from %d tokens: %s", request.request_id, len(joined.token_ids), failed)
            tried.append(lost)

    def ready(self) -> bool:
        """Whether a request could be taken now."""
        usable = {instance.role for instance in self.pool.instances if instance.healthy}
        return "both" in usable or {"prefill", "decode"} <= usable

    async def close(self) -> None:
        """End what is still being drained."""
        for task in list(self._drains):
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)

    async def _choose(self, tried: list[Instance], patience_s: float) -> tuple[Instance, ...]:
        """Return (prefill, decode), or one engine that does both; wait for them where there are none.

        Raises `EngineUnavailableError`.
        """
        deadline = time.monotonic() + patience_s
        while True:
            prefill, decode = self.pool.pick("prefill", tried), self.pool.pick("decode", tried)
            if prefill is not None and decode is not None:
                return prefill, decode
            both = self.pool.pick("both", tried)
            if both is not None:
                return (both,)
            if time.monotonic() >= deadline:
                problems = [f"{i.url}: {i.problem}" for i in self.pool.instances if i.problem is not None]
                raise EngineUnavailableError("; ".join(["no engine can take the request now", *problems]))
            await asyncio.sleep(_PATIENCE_STEP_S)

    async def _run(
        self, request: GenerateRequest, chosen: tuple[Instance, ...], kv_mode: KVMode
    ) -> AsyncGenerator[TokenChunk, None]:
        """One attempt. Raises `LegFailed` where another may succeed."""
        if len(chosen) == 1:
            async with contextlib.aclosing(self._join(request, {"decode": chosen[0]}, None)) as joined:
                async for chunk, _ in joined:
                    yield _checked(chunk)
            return
        prefill, decode = chosen
        ticket = self._mint(request, prefill, decode, kv_mode)
        self.handoffs["started"] += 1
        self.num_active_handoffs += 1
        outcome = "aborted"
        try:
            legs = self._join(request, {"prefill": prefill, "decode": decode}, ticket)
            async with contextlib.aclosing(legs) as joined:
                async for chunk, leg in joined:
                    if chunk.finish_reason == "error":
                        outcome = "failed"
                        self.failures[(chunk.error or "unknown").partition(":")[0]] += 1
                    elif chunk.finish_reason is not None:
                        outcome = "completed" if leg == "decode" else "finished_early"
                    yield _checked(chunk)
        except LegFailed as failed:
            if outcome != "failed":
                outcome = "failed"
                self.failures[type(failed.error).__name__] += 1
            raise
        finally:
            self.num_active_handoffs -= 1
            self.handoffs[outcome] += 1

    async def _join(
        self, request: GenerateRequest, engines: dict[Leg, Instance], ticket: str | None
    ) -> AsyncGenerator[tuple[TokenChunk, Leg], None]:
        items: Items = asyncio.Queue()

        def on_lost(leg: Leg) -> OnLost:
            return lambda error: items.put_nowait((leg, error))

        with contextlib.ExitStack() as counted:
            legs: dict[Leg, Chunks] = {}
            for leg, engine in engines.items():
                counted.enter_context(engine.leg(on_lost(leg)))
                handoff = None if ticket is None else HandoffParams(role=leg, ticket=ticket)
                legs[leg] = engine.client.generate(msgspec.structs.replace(request, handoff=handoff))
            async with contextlib.aclosing(join_legs(legs, items, self._drain)) as joined:
                async for item in joined:
                    yield item

    def _mint(self, request: GenerateRequest, prefill: Instance, decode: Instance, kv_mode: KVMode) -> str:
        p, d = prefill.info, decode.info
        if self._ticket_key is None:
            raise EngineUnavailableError("the router has no ticket key, and so cannot hand off")
        if p is None or d is None or p.control_address is None or d.control_address is None:
            raise EngineUnavailableError("an engine of the pair is not known any more")
        ticket = Ticket(
            transfer_id=new_transfer_id(),
            prefill_engine=p.engine_id,
            prefill_incarnation=p.incarnation,
            prefill_address=p.control_address,
            decode_engine=d.engine_id,
            decode_incarnation=d.incarnation,
            decode_address=d.control_address,
            mode=kv_mode,
            expiry=int(time.time()) + TICKET_LIFE_S,
            request_digest=prefill.client.digest(request),
        )
        return mint(self._ticket_key, ticket)

    def _drain(self, leg: Chunks) -> None:
        """Read a leg to its end in the background: it ends by itself, and closing it would abort it."""

        async def drain() -> None:
            async with contextlib.aclosing(leg):
                with contextlib.suppress(BatonError, asyncio.TimeoutError):
                    await asyncio.wait_for(_exhaust(leg), self.pool.timers.drain)

        task = asyncio.create_task(drain())
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)


def _checked(chunk: TokenChunk) -> TokenChunk:
    """The chunk, unless it says that the request may succeed elsewhere."""
    if chunk.finish_reason == "error" and chunk.recoverable:
        raise LegFailed("decode", error_of_chunk(chunk.error), reported=True)
    return chunk


def _rung(failed: LegFailed, any_sent: bool) -> Recovery | None:
    """The rung of the ladder that another attempt would be; None where none would help."""
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
