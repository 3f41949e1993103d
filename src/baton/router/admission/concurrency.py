"""Limits running requests to what the engines decode at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractAsyncContextManager

from baton.openai.http.metrics import Row, counter, gauge
from baton.router.admission.fair_queue import FairQueue
from baton.router.admission.tenants import Standing, Tenant
from baton.router.workers.loads import WorkerLoads

# Seconds between looks for room on engines that have joined.
_LOOK_AGAIN_S = 0.25
# Seconds between looks for slots that other processes have freed.
_LOOK_BESIDE_S = 0.01
_ANYBODY = Standing()
_NO_TENANTS: Mapping[str, Tenant] = {}


class _Slot:
    __slots__ = ("_limit", "_output", "_standing")

    def __init__(self, limit: ConcurrencyLimit, standing: Standing, output: Sized) -> None:
        self._limit, self._standing, self._output = limit, standing, output

    async def __aenter__(self) -> None:
        await self._limit.begin(self._standing)

    async def __aexit__(self, *error: object) -> None:
        self._limit.end(self._standing, len(self._output))


class ConcurrencyLimit:
    """Holds back requests beyond the engines' `--max-num-seqs`: after their prefill they would hold pages of a prefill
    engine. `capacity` None: unknown (no engine, or vLLM)."""

    def __init__(
        self,
        capacity: Callable[[], int | None],
        tenants: Mapping[str, Tenant] = _NO_TENANTS,
        loads: WorkerLoads | None = None,
    ) -> None:
        """`loads`: of the router's other processes."""
        self.tenants, self._loads = tenants, loads
        self._look_again_s = _LOOK_AGAIN_S if loads is None else _LOOK_BESIDE_S
        self._capacity = capacity
        self._queue: FairQueue[asyncio.Event] = FairQueue(tenants)
        self.num_running = 0

    def slot(self, standing: Standing = _ANYBODY, output: Sized = ()) -> AbstractAsyncContextManager[None]:
        """Wait for a slot. `output`: tokens, charged to the tenant at the end.

        Raises `OverloadedError`.
        """
        return _Slot(self, standing, output)

    async def begin(self, standing: Standing) -> None:
        now = asyncio.get_running_loop().time
        if not (self._has_room() and self._queue.start(standing, now())):
            mine = asyncio.Event()
            self._queue.push(mine, standing, now())
            if not self._may_run(mine):
                await self._wait_turn(mine, standing.tenant)
            self._queue.take(now())
        self._count(1)
        self._wake()

    def end(self, standing: Standing, num_tokens: int) -> None:
        self._count(-1)
        self._queue.charge(standing.tenant, num_tokens)
        self._queue.end(standing.tenant)
        self._wake()

    def rows(self) -> Iterator[Row]:
        """For `/metrics`."""
        for tenant, waiting, running, tokens in self._queue.counts() if self.tenants else ():
            yield gauge("router_tenant_requests_waiting", "A tenant's requests that wait.", waiting, tenant=tenant)
            yield gauge("router_tenant_requests_running", "A tenant's requests that run.", running, tenant=tenant)
            yield counter("router_tenant_tokens", "Tokens of a tenant's prompts and answers.", tokens, tenant=tenant)

    def _has_room(self) -> bool:
        capacity = self._capacity()
        elsewhere = 0 if self._loads is None else self._loads.num_running_elsewhere
        return capacity is None or self.num_running + elsewhere < capacity

    def _count(self, change: int) -> None:
        self.num_running += change
        if self._loads is not None:
            self._loads.run(self.num_running)

    def _may_run(self, mine: asyncio.Event) -> bool:
        return self._has_room() and self._queue.next() is mine

    def _wake(self) -> None:
        if len(self._queue) and self._has_room() and (first := self._queue.next()) is not None:
            first.set()

    async def _wait_turn(self, mine: asyncio.Event, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._queue.check(tenant, loop.time())
            while not self._may_run(mine):
                mine.clear()
                # A client's cancellation must not be taken for a timeout.
                timer = loop.call_later(self._look_again_s, mine.set)
                try:
                    await mine.wait()
                finally:
                    timer.cancel()
        except BaseException:
            self._queue.remove(mine)
            self._wake()
            raise
