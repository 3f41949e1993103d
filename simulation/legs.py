"""The HTTP between the real router and modelled engines: an `EngineClient` per engine and a stream per leg."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from baton.errors import BatonError, DrainingError, EngineLostError, EngineUnavailableError
from baton.openai.http.api_errors import to_api_error
from baton.router.clients.engine_client import EngineClient, error_of_response
from baton.router.leg_tasks import Chunks
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, TokenChunk

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.router import Router

_ONE_WAY = (0.0005, 0.005)
_Item = TokenChunk | BatonError | None  # None: the response has ended


class Stream:
    """One leg's HTTP response: chunks and an end, in order, until either side breaks the connection."""

    def __init__(self, router: Router, url: str, request: GenerateRequest) -> None:
        self.router, self.url, self.request = router, url, request
        self.world = router.world
        self.process: Process | None = None  # the process that took the leg
        self.open = True
        self.began = router.world.now
        self.gone = False  # the engine has noticed that the client is gone
        self.items: asyncio.Queue[_Item] = asyncio.Queue()
        self._last = 0.0

    def _deliver(self, item: _Item) -> None:
        """Deliver in order, or not at all if the stream breaks on the way."""
        at = max(self._last, self.world.now + self.world.random.uniform(*_ONE_WAY)) + 1e-6
        self._last = at
        self.world.after(at - self.world.now, self._arrive, item)

    def _arrive(self, item: _Item) -> None:
        if self.open and not self.router.loop.dead:
            self.items.put_nowait(item)

    # ------------------------------------------------------------ the engine's side

    def send(self, chunk: TokenChunk, last: bool) -> None:
        """Send a chunk of the request; after the `last` one the response ends."""
        if chunk.token_ids and self.world.hit("cut_stream"):
            self.cut(0.0, self.world.random.uniform(0.0, 0.5))
            return
        self._deliver(chunk)
        if last:
            self._deliver(None)

    def refuse(self, error: Exception) -> None:
        """The engine refuses the request; the router gets the status and body of `error`."""
        told = to_api_error(error)
        body = msgspec.json.encode({"error": {"message": told.message, "param": told.param}})
        self._deliver(error_of_response(self.url, told.status, body))

    # ------------------------------------------------------------ breaks

    def hang_up(self) -> None:
        """The router closes the stream; the engine notices later."""
        if self.open:
            self.open = False
            # A server notices at its next write or check.
            late = self.world.random.choice((0.0, 0.4, 3.0)) * self.world.random.random()
            self.world.after(late + self.world.random.uniform(*_ONE_WAY), self.noticed)

    def cut(self, engine_after: float, router_after: float) -> None:
        """The connection breaks; each side notices after its own delay."""
        if not self.open:
            return
        self.open = False
        self.world.note("http", f"the stream of {self.request.request_id} breaks")
        self.world.after(engine_after, self.noticed)
        taken = self.process is not None
        error = EngineLostError if taken else EngineUnavailableError
        self.world.after(router_after, self._break, error(f"engine {self.url}: the connection broke"))

    def _break(self, error: BatonError) -> None:
        if not self.router.loop.dead:
            self.items.put_nowait(error)

    def noticed(self) -> None:
        self.gone = True
        process = self.process
        if process is not None and not process.dead:
            process.post(lambda: process.engine.hung_up(self))


class SimClient(EngineClient):
    """The router's client of one engine: it reaches whichever process is at the address."""

    def __init__(self, router: Router, url: str, name: str) -> None:
        self.url, self._router, self._name = url, router, name
        self._world = router.world

    @property
    def _process(self) -> Process:
        return self._router.cluster.processes[self._name]

    async def info(self) -> EngineInfo:
        world, began = self._world, self._world.now
        await asyncio.sleep(world.random.uniform(*_ONE_WAY))
        process = self._process
        if process.dead:
            raise EngineUnavailableError(f"engine {self.url}: connection refused")
        if process.paused or world.hit("slow_answer"):
            await asyncio.sleep(self._router.timers.answer)
            raise EngineLostError(f"engine {self.url} does not answer")
        if process.leaving:
            raise DrainingError(f"engine {self.url} is draining")
        info = process.info()
        await asyncio.sleep(world.random.uniform(*_ONE_WAY))
        if self._router.loop.resumed_at > began + self._router.timers.answer:
            raise EngineLostError(f"engine {self.url} has not answered by the time that this process went on")
        return info

    async def load(self) -> EngineLoad:
        raise EngineUnavailableError("no load is modelled")

    async def generate(self, request: GenerateRequest) -> Chunks:
        world = self._world
        if not world.keeps_places:
            request = msgspec.structs.replace(request, waited_s=0.0)
        stream = Stream(self._router, self.url, request)
        self._router.cluster.streams.append(stream)
        late = world.random.uniform(0.0, 1.5) if world.hit("late_leg") else 0.0
        world.after(late + world.random.uniform(*_ONE_WAY), self._router.cluster.post_leg, stream, self._name)
        try:
            while True:
                item = await stream.items.get()
                if item is None:
                    return
                if isinstance(item, BatonError):
                    raise item
                yield item
        finally:
            if not self._router.loop.dead:
                stream.hang_up()
