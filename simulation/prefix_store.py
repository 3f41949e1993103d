"""A modelled prefix store: answers come late, and pages stay referenced while they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.engine.request import Request
from baton.kv.state_pool import StatePool

if TYPE_CHECKING:
    from simulation.engine import Engine


class SimPrefixStore:
    """An empty store. Some requests wait for its answer, so that queues are in another order than arrivals."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._process, self._world = engine, engine.process, engine.process.world

    def bind(self, post: Callable[[Callable[[], None]], None], on_failure: Callable[[str], None]) -> None:
        """Nothing to bind: posted calls must also wake the modelled loop, so they go through the process."""

    def load(self, request: Request, then: Callable[[int], None]) -> bool:
        if self._world.random.random() < 0.5:
            return False
        self._later(lambda: then(0))
        return True

    def save(self, request: Request, num_final: int) -> None:
        story, pages = self._engine.stories[request.request_id], {}
        if any(isinstance(pool, StatePool) for pool in self._engine.cache.pools.values()):
            return  # stored states are not modelled
        for name, pool in self._engine.cache.pools.items():
            if not pool.enable_caching:
                return
            table = request.kv.pages[name]
            pages[name] = table[: min(num_final // pool.page_size, pool.num_computed(table))]
            pool.share(pages[name])

        def written() -> None:
            for name, table in pages.items():
                memory, pool = self._engine.memory(name), self._engine.cache.pools[name]
                bad = memory.wrong(story, num_final, table, 0, len(table) * pool.page_size)
                if bad is not None:
                    self._world.fail("wrong_kv", f"{self._process.name} stores another entry of {name} at {bad}")
                pool.release(table)

        self._later(written)

    def _later(self, call: Callable[[], None]) -> None:
        late = self._world.random.choice((0.1, 1.0)) * self._world.random.random()
        self._world.after(late, self._process.post, call)
