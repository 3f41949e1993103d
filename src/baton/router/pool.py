"""The engines of a router: their identity, their health, and the choice among them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from baton.comparison import differing_facts, facts_of, token_facts, token_identity, unequal_facts
from baton.errors import (
    BatonError,
    ConfigError,
    DrainingError,
    EngineLostError,
    EngineUnavailableError,
    IncompatiblePeerError,
    ProtocolError,
    RequestError,
)
from baton.openai import ServedModel
from baton.router.address import checked_url
from baton.router.client import EngineClient
from baton.router.prefixes import KnownPrefixes
from baton.router.timers import RouterTimers
from baton.text import Tokenizer
from baton.wire import EngineInfo, GenerateRequest, Role

logger = logging.getLogger(__name__)

Policy = Literal["round_robin", "least_loaded"]
OnLost = Callable[[EngineLostError], None]
NewClient = Callable[[aiohttp.ClientSession, str, RouterTimers, Role], EngineClient]


@dataclass(frozen=True, slots=True, eq=False)
class _Leg:
    on_lost: OnLost
    may_move: Callable[[], bool]


@dataclass(slots=True, eq=False)
class PooledEngine:
    """One engine. `num_inflight`: this router's legs on it. `problem`: why it cannot be used.

    - `answered`: when it last answered, in monotonic seconds. `num_silent`: unanswered questions since.
    - `gone`: since then nothing, or the wrong server, listened at its address. If that is silent now, an engine is
      starting there.
    - `evicted`: its lease has expired, and its legs were failed.
    - `draining`: it gets no new requests, by its own word or the operator's (`leaving`).
    - `known`: the prefixes that it probably holds.
    """

    client: EngineClient
    role: Role
    info: EngineInfo | None = None
    problem: str | None = "not reached yet"
    num_inflight: int = 0
    order: int = 0
    answered: float = 0.0
    num_silent: int = 0
    gone: bool = False
    evicted: bool = False
    draining: bool = False
    leaving: bool = False
    known: KnownPrefixes = field(default_factory=KnownPrefixes)
    when_busy: Callable[[], None] = lambda: None
    when_idle: Callable[[], None] = lambda: None
    _legs: list[_Leg] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def name(self) -> str:
        """The engine id, or the URL until it is known."""
        return self.url if self.info is None else self.info.engine_id

    @property
    def identity(self) -> str | None:
        """The `comparison.token_identity`; None until the engine has answered."""
        return None if self.info is None else token_identity(self.info.fingerprint)

    def may_serve(self, request: GenerateRequest) -> bool:
        """Whether it gives the request the tokens for which it was planned, and room for all of them."""
        if self.info is None or request.identity not in (None, self.identity):
            return False
        return len(request.prompt_token_ids) - request.num_known + request.sampling_params.max_tokens <= (
            self.info.max_model_len
        )

    @property
    def healthy(self) -> bool:
        return self.problem is None and self.info is not None and not self.leaving

    @property
    def suspected(self) -> bool:
        """Whether it is silent, but not yet given up."""
        given_up = self.gone or self.evicted or self.leaving
        return self.info is not None and self.num_silent > 0 and not given_up

    @contextlib.contextmanager
    def leg(self, on_lost: OnLost, may_move: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Count a leg while it runs. `on_lost` is called if the engine is given up. It is called as soon as the engine
        falls silent if `may_move`: the leg loses nothing, and another engine can take it.
        """
        self.num_inflight += 1
        leg = _Leg(on_lost, may_move)
        self._legs.append(leg)
        self.when_busy()
        try:
            yield
        finally:
            self.num_inflight -= 1
            self._legs.remove(leg)
            if not self.num_inflight:
                self.when_idle()

    def evict(self, error: EngineLostError) -> None:
        """Give the engine up: fail its legs."""
        self.evicted = True
        for leg in list(self._legs):
            leg.on_lost(error)

    def move(self, error: EngineLostError) -> None:
        """Fail the legs that may move, before the engine's lease expires."""
        for leg in [leg for leg in self._legs if leg.may_move()]:
            leg.on_lost(error)


class EnginePool:
    """The router's engines, for one event loop. Only `rebind`, `add`, `refresh` and `watch` wait.

    The first request binds the pool to the model that is served then. Until an operator calls `rebind`, an engine is
    refused if it differs in a fact that decides tokens, or has a shorter context, whichever engines are alive.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        new_client: NewClient,
        policy: Policy = "round_robin",
        tokenizer_dir: str | None = None,
        timers: RouterTimers | None = None,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
    ) -> None:
        """`tokenizer_dir` None: the engines' checkpoint. Times are those of the event loop."""
        self.timers = timers or RouterTimers()
        self._new_client = new_client
        self._session = session
        self._policy = policy
        self._tokenizer_dir, self._load = tokenizer_dir, load_tokenizer
        self._engines: dict[str, PooledEngine] = {}
        self._removed: set[PooledEngine] = set()  # removed engines that still have legs
        self._turn = 0
        self._model: ServedModel | None = None
        self._reference: EngineInfo | None = None  # the engine from which `_model` was made
        self._bound_length: int | None = None
        self._asking: dict[PooledEngine, asyncio.Task[None]] = {}

    @property
    def engines(self) -> list[PooledEngine]:
        """All engines, in the order of joining."""
        return list(self._engines.values())

    def model(self) -> ServedModel:
        """The served model. Raises `EngineUnavailableError` until an engine has answered."""
        if self._model is None:
            raise EngineUnavailableError("no engine has been reached yet")
        infos = [e.info for e in self._engines.values() if e.info is not None]
        length = self._bound_length or min([self._model.max_model_len, *(info.max_model_len for info in infos)])
        drafts = max([self._model.num_speculative_tokens, *(info.num_speculative_tokens for info in infos)])
        return dataclasses.replace(self._model, max_model_len=length, num_speculative_tokens=drafts)

    def bind(self) -> None:
        """Bind the pool to the model that it serves now. Raises the errors of `model`."""
        if self._bound_length is None:
            self._bound_length = self.model().max_model_len

    @property
    def bound(self) -> bool:
        """Whether a request was served since the start or `rebind`."""
        return self._bound_length is not None

    async def rebind(self) -> None:
        """Forget the served model and ask all engines; the first that answers decides. Running requests continue on
        engines of the identity with which they began.
        """
        self._model = self._reference = self._bound_length = None
        for engine in self.engines:
            engine.problem = "not asked yet what it serves now"
        logger.warning("the pool's identity is cleared: the first engine that answers decides what is served")
        for engine in self.engines:
            await self.refresh(engine)

    async def add(self, url: str, role: Role) -> PooledEngine:
        """Add an engine, even if it does not answer yet.

        Raises `RequestError` for a bad URL or a role other than the engine's, `IncompatiblePeerError` if its model or
        drafter differs from the other engines'.
        """
        url = checked_url(url)
        if url in self._engines:
            raise RequestError(f"{url} is an engine of this router already", "url")
        engine = PooledEngine(self._new_client(self._session, url, self.timers, role), role)
        try:
            await self._identify(engine)
        except EngineUnavailableError as error:
            engine.problem = str(error)
        if url in self._engines:  # added twice at the same time
            raise RequestError(f"{url} is an engine of this router already", "url")
        self._engines[url] = engine
        if engine.problem is None:
            logger.info("engine %s: %s joins as %s", url, engine.name, role)
        else:
            logger.warning("engine %s joins as %s, and cannot be used yet: %s", url, role, engine.problem)
        return engine

    def remove(self, url: str) -> PooledEngine:
        """Remove an engine. Running requests end there, or elsewhere if it falls silent. Raises `RequestError` if it is
        unknown.
        """
        engine = self._engines.pop(checked_url(url), None)
        if engine is None:
            raise RequestError(f"{url} is not an engine of this router", "url")
        logger.info("engine %s is removed; %d legs on it go on", engine.url, engine.num_inflight)
        self._part(engine)
        return engine

    def drain(self, url: str) -> PooledEngine:
        """Send an engine no new requests, and remove it after its last leg. A second call moves its legs elsewhere.
        Raises `RequestError` if it is unknown.
        """
        engine = self._engines.get(checked_url(url))
        if engine is None:
            raise RequestError(f"{url} is not an engine of this router", "url")
        hurry = " at once" if engine.leaving else ""
        logger.info("engine %s is drained%s; %d legs are on it", engine.url, hurry, engine.num_inflight)
        if engine.leaving:
            engine.evict(EngineLostError(f"engine {engine.url} is drained in a hurry"))
        engine.draining = engine.leaving = True
        if not engine.num_inflight:
            self._left(engine)
        else:
            engine.when_idle = lambda: self._left(engine)
        return engine

    def _left(self, engine: PooledEngine) -> None:
        if self._engines.get(engine.url) is engine:
            del self._engines[engine.url]
            logger.info("engine %s has left", engine.url)
        self._part(engine)

    def _part(self, engine: PooledEngine) -> None:
        """Watch a removed engine while it has legs. A request that was already routed may still add one."""
        engine.leaving = True
        engine.when_busy = lambda: self._removed.add(engine)
        engine.when_idle = lambda: self._removed.discard(engine)
        if engine.num_inflight:
            engine.when_busy()

    def usable(self, healthy: bool) -> list[PooledEngine]:
        """The engines that may get requests: the healthy ones, or the suspected ones."""
        return [e for e in self._engines.values() if (e.healthy if healthy else e.suspected)]

    def max_num_seqs(self) -> int | None:
        """How many requests the healthy engines decode at once; None if none is known, or one does not tell."""
        infos = [e.info for e in self.usable(healthy=True) if e.role != "prefill"]
        told = [info.max_num_seqs for info in infos if info is not None]
        return sum(told) if told and all(told) else None

    def take(self, among: Sequence[PooledEngine]) -> PooledEngine:
        """Choose one of at least one engine, by policy."""
        self._turn += 1
        if self._policy == "least_loaded":
            chosen = min(among, key=lambda e: (e.num_inflight, e.order))
        else:
            chosen = min(among, key=lambda e: e.order)
        chosen.order = self._turn  # equal loads take turns
        return chosen

    def has_other(self, engine: PooledEngine, avoid: Sequence[PooledEngine] = ()) -> bool:
        """Whether another engine of its role, not in `avoid`, can take requests."""
        mine = (e for e in self._engines.values() if e.role == engine.role and e.healthy)
        return any(e is not engine and e not in avoid for e in mine)

    async def refresh(self, engine: PooledEngine) -> None:
        """Ask an engine for its identity, after it failed or restarted."""
        await asyncio.shield(self._ask(engine))

    async def watch(self) -> None:
        """Refresh all engines forever, and removed ones until their last leg has ended. None waits for another."""
        try:
            while True:
                for engine in (*self.engines, *self._removed):
                    self._ask(engine)
                await asyncio.sleep(self.timers.check)
        finally:
            asking = list(self._asking.values())
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _ask(self, engine: PooledEngine) -> asyncio.Task[None]:
        task = self._asking.get(engine)
        if task is None:
            task = self._asking[engine] = asyncio.create_task(self._check(engine))
            task.add_done_callback(lambda _: self._asking.pop(engine, None))
        return task

    async def _check(self, engine: PooledEngine) -> None:
        try:
            await self._identify(engine)
        except BatonError as error:
            if engine.problem != str(error):
                logger.warning("engine %s: %s", engine.url, error)
            engine.problem = str(error)
            # An engine that was draining and is gone counts as draining until it is back.
            engine.draining |= isinstance(error, DrainingError)
            if not isinstance(error, EngineLostError):
                engine.num_silent = 0
                engine.gone = True
                return
            engine.num_silent += 1
            silent_s = asyncio.get_running_loop().time() - engine.answered
            # After one unanswered question only, this process itself may have been paused.
            taken = engine.info is not None and not engine.evicted
            if taken and engine.num_silent > 1 and silent_s >= self.timers.lease:
                logger.warning("engine %s is given up after %.1f s", engine.url, silent_s)
                engine.evict(EngineLostError(f"engine {engine.url} has not answered for {silent_s:.1f} s"))
            elif engine.num_silent > 1:
                engine.move(EngineLostError(f"engine {engine.url} does not answer, and another can take the request"))

    async def _identify(self, engine: PooledEngine) -> None:
        info = await engine.client.info()
        if info.role != engine.role:
            raise RequestError(f"{engine.url} has role {info.role!r}, not {engine.role!r}", "role")
        if engine.role != "both" and not info.control_addresses:
            raise ProtocolError(f"{engine.url} has role {info.role!r} but no control address")
        if not info.token_api:
            raise ProtocolError(f"{engine.url} does not serve routers: start it with --token-api")
        self._check_same_model(engine, info)
        await self._adopt(engine, info)
        if engine.info is None or engine.info.incarnation != info.incarnation:
            engine.known = KnownPrefixes(info.prefix_step, info.kv_tokens)
        if engine.problem is not None and self._engines.get(engine.url) is engine:
            logger.info("engine %s: %s can be used", engine.url, info.engine_id)
        engine.info, engine.problem = info, None
        engine.draining = engine.leaving
        engine.answered, engine.num_silent = asyncio.get_running_loop().time(), 0
        engine.gone = engine.evicted = False

    async def _adopt(self, engine: PooledEngine, info: EngineInfo) -> None:
        """Serve this engine's model if nothing else is served."""
        if self._reference is not None and self._is_alone(engine) and _differing(self._reference, info):
            self._model = None
        while self._model is None:
            directory = self._tokenizer_dir or info.model_path
            try:
                loop = asyncio.get_running_loop()
                tokenizer = await loop.run_in_executor(None, self._load, directory)
            except BatonError as error:
                raise ConfigError("tokenizer", f"{error}; name its directory with --tokenizer") from None
            if self._model is None:
                self._model, self._reference = ServedModel.of(info, tokenizer), info
                if told := info.sampling_defaults.told():
                    logger.info("requests of %s that do not say otherwise are sampled with %s", info.model, told)
        self._check_same_model(engine, info)  # another engine may have decided meanwhile

    def _is_alone(self, engine: PooledEngine) -> bool:
        """Whether no request was served and no other engine is in use."""
        others = (other for other in self.engines if other is not engine and other.info is not None)
        return not self.bound and all(other.problem is not None for other in others)

    def _check_same_model(self, engine: PooledEngine, info: EngineInfo) -> None:
        """Raise `IncompatiblePeerError` if it differs from the served model, or from an engine in use."""
        alive = [e.info for e in self.engines if e is not engine and e.info is not None and e.problem is None]
        served = [] if self._reference is None or self._is_alone(engine) else [self._reference]
        for other in served + alive:
            different = _differing(other, info)
            if different:
                raise IncompatiblePeerError(different)
        if self._bound_length is not None and info.max_model_len < self._bound_length:
            served_length = f"at least {self._bound_length}, which is served"
            raise IncompatiblePeerError({"max_model_len": (served_length, info.max_model_len)})


def _differing(served: EngineInfo, info: EngineInfo) -> dict[str, tuple[object, object]]:
    """Differences, by name, between two engines that must give the same tokens."""
    names = ("model", "vocab_size", "default_seed", "num_speculative_tokens")
    pairs = {name: (getattr(served, name), getattr(info, name)) for name in names}
    different: dict[str, tuple[object, object]] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if served.fingerprint != info.fingerprint:
        facts = differing_facts(facts_of(served.fingerprint), facts_of(info.fingerprint))[0]
        if "drafter.num_speculative_tokens" not in facts:
            different.pop("num_speculative_tokens", None)
        different |= facts | unequal_facts(token_facts(served.fingerprint), token_facts(info.fingerprint))
    return different
