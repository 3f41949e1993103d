"""Mutations of the router: its identity checks, its joining of tokens, and engines that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from baton import comparison
from baton.engine import request_checks
from baton.errors import IncompatiblePeerError, RequestError
from baton.openai import backend as served
from baton.router import identity, pooled_engine
from baton.router.admission.concurrency import ConcurrencyLimit
from baton.router.attempts.join import Joined
from baton.router.clients.address import checked_url
from baton.router.identity import PoolIdentity
from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine
from baton.wire import EngineInfo, GenerateRequest, TokenChunk
from simulation.mutations.registry import Patch, mutation

_RESTARTS = ("other_settings", "crash_prefill", "crash_decode", "cut_stream")


def _anyone(self: PooledEngine, request: GenerateRequest) -> bool:
    return self.info is not None


def _unchecked(wire: GenerateRequest, info: EngineInfo) -> None:
    """An engine that accepts every request."""


@mutation("a stream goes on with the model that began it, and a pool serves what it served first", _RESTARTS)
def _whoever_lives_agrees() -> list[Patch]:
    def check(self: PoolIdentity, engine: PooledEngine, info: EngineInfo) -> None:
        for other in self._engines():
            if other is not engine and other.info is not None and other.problem is None:
                different = identity.differing(other.info, info)
                if different:
                    raise IncompatiblePeerError(different)

    return [
        (PooledEngine, "may_serve", _anyone),
        (PoolIdentity, "check", check),
        (request_checks, "check_identity", _unchecked),
    ]


@mutation("end tokens are a fact: they decide where an output ends", _RESTARTS)
def _end_tokens_in_no_fact() -> list[Patch]:
    original = comparison.facts_of

    def facts_of(fingerprint: str) -> dict[str, object]:
        return {name: value for name, value in original(fingerprint).items() if name != "output.eos_token_ids"}

    def token_facts(fingerprint: str) -> dict[str, object]:
        return facts_of(fingerprint)

    def token_identity(fingerprint: str) -> str:
        return msgspec.json.encode(facts_of(fingerprint), order="deterministic").decode()[:64]

    return [
        (identity, "facts_of", facts_of),
        (identity, "token_facts", token_facts),
        (pooled_engine, "token_identity", token_identity),
        (request_checks, "token_identity", token_identity),
        (served, "token_identity", token_identity),
    ]


@mutation("an engine with a shorter context does not continue a request that needs more", _RESTARTS)
def _short_contexts_are_taken() -> list[Patch]:
    original = PoolIdentity.check

    def check(self: PoolIdentity, engine: PooledEngine, info: EngineInfo) -> None:
        bound, self._bound_length = self._bound_length, None
        try:
            original(self, engine, info)
        finally:
            self._bound_length = bound

    def may_serve(self: PooledEngine, request: GenerateRequest) -> bool:
        return self.info is not None and request.identity in (None, self.identity)

    def check_identity(wire: GenerateRequest, info: EngineInfo) -> None:
        if wire.identity not in (None, comparison.token_identity(info.fingerprint)):
            raise IncompatiblePeerError({"identity": (None, wire.identity)})

    return [
        (PoolIdentity, "check", check),
        (PooledEngine, "may_serve", may_serve),
        (request_checks, "check_identity", check_identity),
    ]


@mutation("one unanswered question is not enough to give an engine up", ("pause_router",))
def _one_silence_gives_up() -> list[Patch]:
    original = EnginePool._check

    async def check(self: EnginePool, engine: PooledEngine) -> None:
        engine.num_silent = max(1, engine.num_silent)
        await original(self, engine)

    return [(EnginePool, "_check", check)]


@mutation("what is left of a request counts its output from the client's prompt on")
def _resumed_prompts_are_longer() -> list[Patch]:
    original = Joined.rest

    def rest(self: Joined, attempt: int, waited_s: float = 0.0, trusted: int | None = None) -> GenerateRequest:
        request = original(self, attempt, waited_s, trusted)
        if attempt == 0:
            return request
        left = request.sampling_params.max_tokens - len(self.token_ids)
        params = msgspec.structs.replace(request.sampling_params, max_tokens=left)
        return msgspec.structs.replace(request, num_prompt_tokens=None, sampling_params=params)

    return [(Joined, "rest", rest)]


@mutation("all attempts of a sampled request have one seed")
def _each_attempt_draws_a_seed() -> list[Patch]:
    original = Joined.rest

    def rest(self: Joined, attempt: int, waited_s: float = 0.0, trusted: int | None = None) -> GenerateRequest:
        request = original(self, attempt, waited_s, trusted)
        seed = request.sampling_params.seed
        if attempt == 0 or seed is None:
            return request
        params = msgspec.structs.replace(request.sampling_params, seed=seed + attempt)
        return msgspec.structs.replace(request, sampling_params=params)

    return [(Joined, "rest", rest)]


@mutation("a token that both legs name goes to the client once")
def _legs_are_not_joined() -> list[Patch]:
    def push(self: Joined, chunk: TokenChunk) -> TokenChunk | None:
        self.token_ids += chunk.token_ids
        return chunk

    return [(Joined, "push", push)]


@mutation("a client that leaves as its turn comes gives its place back", ("client_abort", "burst", "slow_engine"))
def _places_are_lost() -> list[Patch]:
    original = ConcurrencyLimit.slot

    @contextlib.asynccontextmanager
    async def slot(self: ConcurrencyLimit, standing: Any = None, output: Any = ()) -> AsyncIterator[None]:
        ended = False
        async with original(self, standing, output) if standing else original(self, output=output):
            try:
                yield
                ended = True
            finally:
                if not ended:
                    self.num_running += 1

    return [(ConcurrencyLimit, "slot", slot)]


@mutation("a removed engine is watched while it has legs", ("operate_router", "pause_decode", "pause_prefill"))
def _removed_engines_are_forgotten() -> list[Patch]:
    def remove(self: EnginePool, url: str) -> PooledEngine:
        engine = self._engines.pop(checked_url(url), None)
        if engine is None:
            raise RequestError(f"{url} is not an engine of this router", "url")
        engine.leaving = True
        return engine

    return [(EnginePool, "remove", remove)]
