"""An asyncio event loop in virtual time for the router. It runs as events of the world and never blocks.

Callbacks run in the order in which they were scheduled, so a seed always plays the same schedule. There are no sockets
and no threads; `run_in_executor` runs its function at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world import World

# The range of time between two iterations of a real loop, in seconds.
_TURN = (0.00005, 0.0005)


class SimLoop(asyncio.AbstractEventLoop):
    """One process's loop. `fail` receives errors that no caller retrieves. When `dead`, it runs no new callbacks; `end`
    cancels the rest.
    """

    def __init__(self, world: World, fail: Callable[[str], None]) -> None:
        self._world, self._fail = world, fail
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._turn_comes = False
        self.dead = False
        self.paused = False
        self.resumed_at = 0.0

    # ------------------------------------------------------------ the asyncio interface

    def time(self) -> float:
        return self._world.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._come_round()
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.after(max(0.0, when - self._world.now), self._due, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **kwargs)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._fail(f"{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is skipped when it is due."""

    # ------------------------------------------------------------ iterations

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append(handle)
            self._come_round()

    def _come_round(self) -> None:
        if not self._turn_comes and not self.dead:
            self._turn_comes = True
            self._world.after(self._world.random.uniform(*_TURN), self._turn)

    def _turn(self) -> None:
        self._turn_comes = False
        if self.dead or self.paused:
            return
        self._run(1)
        if self._ready and self._world.hit("slow_turn"):
            self.paused = True
            self._world.after(self._world.random.uniform(0.0, 0.5), self._go_on)

    def _go_on(self) -> None:
        self.paused = False
        if self._ready:
            self._come_round()

    def resume(self) -> None:
        """Resume after a pause: everything that came due meanwhile runs in one iteration."""
        if self.paused:
            self.resumed_at = self._world.now
        self.paused = False
        if self._ready:
            self._come_round()

    def _run(self, rounds: int) -> None:
        """Run all ready callbacks, and those that they make ready, for up to `rounds` rounds."""
        outer = asyncio._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=lambda _: None, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        try:
            for _ in range(rounds):
                for _ in range(len(self._ready)):
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
                if not self._ready:
                    return
        finally:
            asyncio._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)
        if not self.dead:
            self._come_round()

    def _finalize(self, generator: Any) -> None:
        if not self.dead:
            self.create_task(generator.aclose())

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """In the order of their creation."""
        return list(self._tasks)

    def end(self) -> None:
        """The process has died: cancel its tasks; what they still do has no effect on the world."""
        self.dead = True
        for _ in range(20):
            left = self.tasks
            if not left:
                return
            for task in left:
                task.cancel()
            self._run(50)
