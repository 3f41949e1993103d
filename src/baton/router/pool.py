"""The engines of a router, and their health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import aiohttp

from baton.errors import (
    BatonError,
    DrainingError,
    EngineLostError,
    EngineUnavailableError,
    ProtocolError,
    RequestError,
    ShortageError,
)
from baton.router.clients.address import checked_url, split_rank
from baton.router.clients.engine_client import EngineClient
from baton.router.identity import PoolIdentity
from baton.router.index.readers import EventReaders
from baton.router.pairs import Pairs
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import KnownPrefixes
from baton.router.timers import RouterTimers
from baton.router.workers.loads import WorkerLoads
from baton.text import Tokenizer
from baton.wire import EngineLoad, Role

logger = logging.getLogger(__name__)

_BARRED = "it refuses this router's tickets: they are signed with another ticket key than its own"

NewClient = Callable[[aiohttp.ClientSession, str, RouterTimers, Role], EngineClient]


class EnginePool:
    """The router's engines, for one event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        new_client: NewClient,
        tokenizer_dir: str | None = None,
        timers: RouterTimers | None = None,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
        is_overload: Callable[[EngineLoad], bool] | None = None,
        readers: EventReaders | None = None,
        loads: WorkerLoads | None = None,
    ) -> None:
        """`tokenizer_dir` None: the engines' checkpoint. `is_overload`: whether an engine with this load gets no new
        requests; None: do not ask for loads. `loads`: shared with the router's other processes.
        """
        self._is_overload, self.loads = is_overload, loads
        self.on_pair_due: Callable[[PooledEngine, PooledEngine], None] = lambda prefill, decode: None
        self.readers = readers or EventReaders()
        self.timers = timers or RouterTimers()
        self.pairs = Pairs(self.timers.trial)
        self._new_client = new_client
        self._session = session
        shared = None if loads is None else loads.binding
        self.identity = PoolIdentity(lambda: self.engines, tokenizer_dir, load_tokenizer, shared)
        self._engines: dict[str, PooledEngine] = {}
        self._joining: set[str] = set()
        self._removed: set[PooledEngine] = set()  # removed engines that still have legs
        self._checks: dict[PooledEngine, asyncio.Task[None]] = {}

    @property
    def engines(self) -> list[PooledEngine]:
        """In order of joining."""
        return list(self._engines.values())

    async def rebind(self) -> None:
        """The next engine that answers decides the served model."""
        self.identity.clear()
        for engine in self.engines:
            engine.problem = "not asked yet what it serves now"
        logger.warning("the pool's identity is cleared: the first engine that answers decides what is served")
        for engine in self.engines:
            await self.refresh(engine)

    async def add(self, url: str, role: Role, known: bool = False) -> PooledEngine:
        """The engine need not answer yet. `known`: another process has it, so it stays even if refused.

        Raises `RequestError` for a bad URL or role, `IncompatiblePeerError` for another model or drafter.
        """
        url = checked_url(url)
        if url in self._engines or url in self._joining:
            raise RequestError(f"{url} is an engine of this router already", "url")
        engine = PooledEngine(self._new_client(self._session, url, self.timers, role), role)
        if self.loads is not None:
            engine.on_load = self.loads.publish
        self._joining.add(url)
        try:
            await self._identify(engine)
        except BatonError as error:
            if not (known or isinstance(error, EngineUnavailableError)):
                raise
            engine.problem = str(error)
        finally:
            self._joining.discard(url)
        self._engines[url] = engine
        if engine.info is not None and engine.problem is None:
            logger.info("engine %s: %s joins as %s", url, engine.name, role)
            self.identity.warn_of_rounding(engine, engine.info)
        else:
            logger.warning("engine %s joins as %s, and cannot be used yet: %s", url, role, engine.problem)
        return engine

    def remove(self, url: str) -> PooledEngine:
        """Running requests end on the engine, or elsewhere if it falls silent. Raises `RequestError`."""
        engine = self._engines.pop(checked_url(url), None)
        if engine is None:
            raise RequestError(f"{url} is not an engine of this router", "url")
        logger.info("engine %s is removed; %d legs on it go on", engine.url, engine.num_inflight)
        self._watch_until_idle(engine)
        return engine

    def drain(self, url: str) -> PooledEngine:
        """Remove the engine after its last leg. A second call moves its legs elsewhere. Raises `RequestError`."""
        engine = self._engines.get(checked_url(url))
        if engine is None:
            raise RequestError(f"{url} is not an engine of this router", "url")
        hurry = " at once" if engine.leaving else ""
        logger.info("engine %s is drained%s; %d legs are on it", engine.url, hurry, engine.num_inflight)
        if engine.leaving:
            engine.evict(EngineLostError(f"engine {engine.url} is drained in a hurry"))
        engine.draining = engine.leaving = True
        if not engine.num_inflight:
            self._remove_now(engine)
        else:
            engine.when_idle = lambda: self._remove_now(engine)
        return engine

    def _remove_now(self, engine: PooledEngine) -> None:
        if self._engines.get(engine.url) is engine:
            del self._engines[engine.url]
            logger.info("engine %s has left", engine.url)
        self._watch_until_idle(engine)

    def _watch_until_idle(self, engine: PooledEngine) -> None:
        """Watch a removed engine while it has legs. A request already routed may still add one."""
        self.readers.stop(engine.url)
        engine.leaving = True
        engine.when_busy = lambda: self._removed.add(engine)
        engine.when_idle = lambda: self._removed.discard(engine)
        if engine.num_inflight:
            engine.when_busy()

    def read_loads(self) -> None:
        if self.loads is not None:
            self.loads.read(self._engines.values())

    def usable(self, healthy: bool) -> list[PooledEngine]:
        return [e for e in self._engines.values() if (e.healthy if healthy else e.suspected)]

    def max_num_seqs(self) -> int | None:
        """None if a healthy engine does not report it."""
        total = 0
        for engine in self._engines.values():
            if engine.role != "prefill" and engine.healthy and (info := engine.info) is not None:
                if not info.max_num_seqs:
                    return None
                total += info.max_num_seqs
        return total or None

    def may_recover(self) -> bool:
        """Whether an engine may come by itself."""
        return not self._engines or not all(engine.refuses_tickets for engine in self._engines.values())

    def has_other(self, engine: PooledEngine, avoid: Sequence[PooledEngine] = ()) -> bool:
        mine = (e for e in self._engines.values() if e.role == engine.role and e.healthy)
        return any(e is not engine and e not in avoid for e in mine)

    async def refresh(self, engine: PooledEngine) -> None:
        """Ask an engine for its identity, after it failed or restarted; if it has a problem, its server's ranks too."""
        await asyncio.shield(self._start_check(engine))
        server, rank = split_rank(engine.url)
        if engine.problem is not None and rank is not None:
            others = [other for other in self.engines if other is not engine and split_rank(other.url)[0] == server]
            await asyncio.shield(asyncio.gather(*map(self._start_check, others)))

    def bar(self, engine: PooledEngine) -> None:
        if engine.info is not None and engine.barred != engine.info.incarnation:
            engine.barred, engine.problem = engine.info.incarnation, _BARRED
            logger.error("engine %s (%s) gets no requests: %s", engine.url, engine.role, _BARRED)

    async def has_died(self, engine: PooledEngine) -> bool:
        await self.refresh(engine)
        return engine.gone and not engine.draining

    async def watch(self) -> None:
        """Refresh all engines forever, and removed ones until their last leg has ended."""
        try:
            while True:
                for engine in (*self.engines, *self._removed):
                    self._start_check(engine)
                for pair in self.pairs.due(self.engines):
                    self.on_pair_due(*pair)
                await asyncio.sleep(self.timers.check)
        finally:
            checks = list(self._checks.values())
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
            await self.readers.close()

    def _start_check(self, engine: PooledEngine) -> asyncio.Task[None]:
        task = self._checks.get(engine)
        if task is None:
            task = self._checks[engine] = asyncio.create_task(self._check(engine))
            task.add_done_callback(lambda _: self._checks.pop(engine, None))
        return task

    async def _check(self, engine: PooledEngine) -> None:
        try:
            await self._identify(engine)
            if self._is_overload is not None:
                engine.overloaded = self._is_overload(await engine.client.load())
        except ShortageError as error:
            if not engine.unasked:
                logger.warning("engine %s cannot be asked: %s", engine.url, error)
            engine.unasked = True
        except BatonError as error:
            if engine.problem != str(error):
                logger.warning("engine %s: %s", engine.url, error)
            engine.problem = str(error)
            # A draining engine that is gone counts as draining until it returns.
            engine.draining |= isinstance(error, DrainingError)
            if not isinstance(error, EngineLostError):
                engine.num_silent = 0
                engine.gone = True
                return
            engine.num_silent += 1
            silent_s = asyncio.get_running_loop().time() - engine.answered
            # Not after a single unanswered question: this process may have been paused.
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
        self.identity.check(engine, info)
        await self.identity.adopt(engine, info)
        if engine.info is None or engine.info.incarnation != info.incarnation:
            clock = asyncio.get_running_loop().time
            held = None if engine.leaving else self.readers.follow(engine.url, info)
            engine.known = held or KnownPrefixes(info.prefix_step, info.kv_tokens, clock)
        problem = _BARRED if engine.barred == info.incarnation else None
        if engine.problem is not None and problem is None and self._engines.get(engine.url) is engine:
            logger.info("engine %s: %s can be used", engine.url, info.engine_id)
            self.identity.warn_of_rounding(engine, info)
        engine.info, engine.problem = info, problem
        engine.draining = engine.leaving
        engine.answered, engine.num_silent = asyncio.get_running_loop().time(), 0
        engine.gone = engine.evicted = engine.unasked = False
