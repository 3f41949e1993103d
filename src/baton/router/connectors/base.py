"""The interface of connectors."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import aiohttp
import msgspec

from baton.errors import ConfigError, EngineLostError, EngineUnavailableError, RequestError
from baton.handoff.protocol.ticket import TICKET_LIFE_S, new_transfer_id
from baton.router.clients.engine_client import EngineClient
from baton.router.leg_tasks import Chunks, LegSource
from baton.router.pooled_engine import PooledEngine
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, LegRole, Mode, Role

# Parameters that need more than the id of the first token, with the values that do not.
_NOT_SEEDED = {
    **{"seed": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    **{"stop": (), "bad_words": (), "structured_outputs": None},
}
# Makes a leg that moves cached KV, from its role, `HandoffParams.prefix_len` and `window_start`, and how many tokens
# the source may lack (None: any).
PrefixLeg = Callable[[LegRole, int, int, int | None], Chunks]
HandoffOutcome = Literal["completed", "finished_early", "aborted", "failed"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Both legs must come within `ticket_life_s` seconds. `seed_first_token`: the decode engine gets P's first token.
    `new_transfer_id`: makes 128 random bits."""

    ticket_key: bytes | None = None
    seed_first_token: bool = False
    ticket_life_s: float = TICKET_LIFE_S
    new_transfer_id: Callable[[], bytes] = new_transfer_id


class Legs(msgspec.Struct, frozen=True):
    """The legs of one attempt: both, or either. `notices`: the decode engine recovers from a lost prefill leg, or
    reports it. `first_token_wait_s`: how long the decode leg waits for the first token before it begins; None: not at
    all. What `on_end` returns is awaited after the legs are closed; if it fails, the engines' timeouts free the same
    resources."""

    chunks: Mapping[LegRole, LegSource]
    notices: bool = True
    first_token_wait_s: float | None = None
    on_end: Callable[[HandoffOutcome], Coroutine[Any, Any, object] | None] | None = None


class Connector(ABC):
    """One kind of handoff, for all engines of a router: makes their clients and the legs of requests.

    `can_seed`: it can send the first token to the decode engine. `has_modes`: a request may choose push or pull.
    `computes_alone`: a decode engine can compute a whole request. `moves_prefixes`: an engine can send cached KV into
    another's prefix cache. Raises `ConfigError` for an unsupported setting.
    """

    needs_ticket_key: ClassVar[bool] = False
    can_seed: ClassVar[bool] = False
    has_modes: ClassVar[bool] = True
    computes_alone: ClassVar[bool] = True
    moves_prefixes: ClassVar[bool] = False

    def __init__(self, config: ConnectorConfig) -> None:
        if config.seed_first_token and not self.can_seed:
            raise ConfigError("seed_first_token", "is for vLLM servers with BatonConnector")
        self.config = config

    @abstractmethod
    def client(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> EngineClient: ...

    @abstractmethod
    def legs(self, request: GenerateRequest, prefill: PooledEngine, decode: PooledEngine, kv_mode: Mode) -> Legs:
        """Nothing is sent before iteration.

        Raises `EngineUnavailableError`.
        """

    def alone(self, request: GenerateRequest, engine: PooledEngine) -> Chunks:
        """As `legs`, for an engine that computes the whole request."""
        return engine.client.generate(request)

    def prefix_leg(
        self, request: GenerateRequest, source: PooledEngine, destination: PooledEngine, mode: Mode, expected: int
    ) -> PrefixLeg:
        """Signs a ticket. `expected`: how many tokens of the prompt `source` probably holds.

        Raises `EngineUnavailableError`.
        """
        raise EngineUnavailableError(f"engine {source.url} cannot send what it has cached")

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError` for an unsupported parameter. Seed None: not given."""
        for name, neutral in _NOT_SEEDED.items():
            if self.config.seed_first_token and getattr(params, name) != neutral:
                raise RequestError(f"{name} is not supported by this router, which runs with --seed-first-token", name)

    def can_resume(self, params: SamplingParams) -> bool:
        """Whether another attempt can continue without changing tokens."""
        return True


def in_turn(
    first: Callable[[asyncio.Future[_T | None]], Chunks], then: Callable[[_T], Chunks]
) -> dict[LegRole, LegSource]:
    """The decode leg `then(value)` begins when the prefill leg `first` sets its future to `value`, after its token, or
    the client would wait for it. A prefill leg that ends the request does not set it.
    """
    value: asyncio.Future[_T | None] = asyncio.get_running_loop().create_future()

    async def prefill() -> Chunks:
        ended = False
        try:
            async with contextlib.aclosing(first(value)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason in ("error", "abort"):
                        raise EngineUnavailableError(chunk.error or "the prefill engine gave the request up")
                    ended |= chunk.finish_reason is not None
                    yield chunk
            if not ended and not value.done():
                raise EngineUnavailableError("the prefill leg ended without a token")
        except EngineLostError as error:
            # No decode engine is waiting that could recover.
            raise EngineUnavailableError(str(error)) from None
        finally:
            if not value.done():
                value.set_result(None)

    async def decode() -> Chunks | None:
        needed = await value
        return None if needed is None else then(needed)

    return {"prefill": prefill(), "decode": decode}


async def read_to_end(leg: Chunks) -> None:
    """Raises `EngineUnavailableError` if the leg ends with an error."""
    async with contextlib.aclosing(leg):
        async for chunk in leg:
            if chunk.finish_reason in ("error", "abort"):
                raise EngineUnavailableError(chunk.error or "the engine gave the request up")


async def errors_only(leg: Chunks) -> Chunks:
    """The leg without its tokens, which the other leg also sends."""
    async with contextlib.aclosing(leg):
        async for chunk in leg:
            if chunk.finish_reason == "error":
                yield chunk
