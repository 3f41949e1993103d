"""Requests through the router: choose engines, mint a ticket, run both legs at once, join their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator

import msgspec

from baton.errors import BatonError, EngineUnavailableError, ProtocolError
from baton.handoff.ticket import TICKET_LIFE_S, Ticket, mint, new_transfer_id, request_digest
from baton.openai import ServedModel
from baton.openai.backend import KVMode
from baton.router.join import join_legs
from baton.router.pool import EnginePool, Instance
from baton.wire import GenerateRequest, HandoffParams, TokenChunk

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_DRAIN_LIMIT_S = 5.0


class RouterBackend:
    """Serves requests over the engines of a pool.

    A request that no engine answered in any way is tried on others; once a token went out, an error is
    final. `handoffs` counts by outcome: `started`, `completed`, `finished_early` (the first token was the
    last), `aborted` (a stop string was found or the client left), `failed` (by reason in `failures`).
    """

    OUTCOMES = ("started", "completed", "finished_early", "aborted", "failed")

    def __init__(
        self,
        pool: EnginePool,
        ticket_key: bytes | None,
        kv_mode: KVMode = "push",
        allow_mode_override: bool = False,
    ) -> None:
        self.pool = pool
        self.allows_kv_mode = allow_mode_override
        self.handoffs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.num_active_handoffs = 0
        self._ticket_key = ticket_key
        self._kv_mode: KVMode = kv_mode
        self._drains: set[asyncio.Task[None]] = set()

    def model(self) -> ServedModel:
        """Return the model all engines serve."""
        return self.pool.model()

    async def generate(
        self, request: GenerateRequest, kv_mode: KVMode | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the request's chunks; see `Backend.generate`."""
        tried: list[Instance] = []
        for attempt in range(1, MAX_ATTEMPTS + 1):
            chosen = self._choose(tried)
            answered = False
            try:
                async with contextlib.aclosing(self._run(request, chosen, kv_mode or self._kv_mode)) as chunks:
                    async for chunk in chunks:
                        answered = True
                        yield chunk
                return
            except (EngineUnavailableError, ProtocolError) as error:
                for instance in chosen:
                    await self.pool.refresh(instance)
                if answered or attempt == MAX_ATTEMPTS:
                    raise
                logger.warning("attempt %d failed, trying again: %s", attempt, error)
                tried += chosen

    def ready(self) -> bool:
        """Whether a request could be taken now."""
        usable = {instance.role for instance in self.pool.instances if instance.healthy}
        return "both" in usable or {"prefill", "decode"} <= usable

    async def close(self) -> None:
        """End what is still being drained."""
        for task in list(self._drains):
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)

    def _choose(self, tried: list[Instance]) -> tuple[Instance, ...]:
        """Return (prefill, decode), or one engine that does both. Raises `EngineUnavailableError`."""
        prefill, decode = self.pool.pick("prefill", tried), self.pool.pick("decode", tried)
        if prefill is not None and decode is not None:
            return prefill, decode
        both = self.pool.pick("both", tried)
        if both is not None:
            return (both,)
        problems = [f"{i.url}: {i.problem}" for i in self.pool.instances if i.problem is not None]
        raise EngineUnavailableError("; ".join(["no engine can take the request now", *problems]))

    async def _run(
        self, request: GenerateRequest, chosen: tuple[Instance, ...], kv_mode: KVMode
    ) -> AsyncGenerator[TokenChunk, None]:
        if len(chosen) == 1:
            with chosen[0].leg():
                async with contextlib.aclosing(chosen[0].client.generate(request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            return
        prefill, decode = chosen
        ticket = self._mint(request, prefill, decode, kv_mode)
        self.handoffs["started"] += 1
        self.num_active_handoffs += 1
        outcome = "aborted"
        try:
            with prefill.leg(), decode.leg():
                legs = join_legs(
                    prefill.client.generate(_leg(request, HandoffParams(role="prefill", ticket=ticket))),
                    decode.client.generate(_leg(request, HandoffParams(role="decode", ticket=ticket))),
                    self._drain,
                )
                async with contextlib.aclosing(legs) as joined:
                    async for chunk, leg in joined:
                        if chunk.finish_reason == "error":
                            outcome = "failed"
                            self.failures[(chunk.error or "unknown").partition(":")[0]] += 1
                        elif chunk.finish_reason is not None:
                            outcome = "completed" if leg == "decode" else "finished_early"
                        yield chunk
        except BatonError as error:
            outcome = "failed"
            self.failures[type(error).__name__] += 1
            raise
        finally:
            self.num_active_handoffs -= 1
            self.handoffs[outcome] += 1

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
            request_digest=request_digest(request.prompt_token_ids, request.sampling_params),
        )
        return mint(self._ticket_key, ticket)

    def _drain(self, leg: AsyncGenerator[TokenChunk, None]) -> None:
        """Read a leg to its end in the background: it ends by itself, and closing it would abort it."""

        async def drain() -> None:
            async with contextlib.aclosing(leg):
                with contextlib.suppress(BatonError, asyncio.TimeoutError):
                    await asyncio.wait_for(_exhaust(leg), _DRAIN_LIMIT_S)

        task = asyncio.create_task(drain())
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)


def _leg(request: GenerateRequest, handoff: HandoffParams) -> GenerateRequest:
    return msgspec.structs.replace(request, handoff=handoff)


async def _exhaust(leg: AsyncGenerator[TokenChunk, None]) -> None:
    async for _ in leg:
        pass
