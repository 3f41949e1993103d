"""The processes of one router: forked, supervised, and ended together."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from baton.errors import BatonError
from baton.parent import die_with_parent

logger = logging.getLogger(__name__)

_YOUNG_S = 5.0
_LOOK_S = 0.2
_HANDLED = (signal.SIGTERM, signal.SIGINT)
# Serves as process `number`, and calls the function when ready.
Serve = Callable[[int, Callable[[], None]], None]


class WorkerProcesses:
    """Processes that run `serve`. One that ends by itself is restarted, after `on_end(number)`.

    They are forks: create no thread or event loop before. If one ends within `young_s` of its start, all end.
    """

    def __init__(
        self,
        num: int,
        serve: Serve,
        on_end: Callable[[int], None] = lambda number: None,
        *,
        young_s: float = _YOUNG_S,
    ) -> None:
        self._num, self._serve, self._on_end, self._young_s = num, serve, on_end, young_s
        self._running: dict[int, tuple[int, float]] = {}  # number and start, by process id
        self._ending = False

    def run(self, on_ready: Callable[[], None]) -> None:
        """Run until all have ended after SIGTERM or SIGINT, which is passed on to them.

        Raises `BatonError` if one ends soon after its start.
        """
        before = {number: signal.signal(number, self._pass_on) for number in _HANDLED}
        ready_pipe, ready_fd = os.pipe()
        try:
            for number in range(self._num):
                self._start(number, ready_fd)
            self._await_ready(ready_pipe, ready_fd, on_ready)
            while self._running:
                self._ended(*os.waitpid(-1, 0), ready_fd)
        except BaseException:
            self._pass_on(signal.SIGTERM)
            while self._running:
                self._running.pop(os.waitpid(-1, 0)[0], None)
            raise
        finally:
            os.close(ready_pipe)
            os.close(ready_fd)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _await_ready(self, ready_pipe: int, ready_fd: int, on_ready: Callable[[], None]) -> None:
        missing = self._num
        while missing > 0 and self._running:
            if select.select([ready_pipe], [], [], _LOOK_S)[0]:
                missing -= len(os.read(ready_pipe, missing))
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                self._ended(pid, status, ready_fd)
        if not missing:
            on_ready()

    def _pass_on(self, number: int, frame: object = None) -> None:
        self._ending = True
        for pid in self._running:
            os.kill(pid, number)

    def _ended(self, pid: int, status: int, ready_fd: int) -> None:
        number, started = self._running.pop(pid)
        self._on_end(number)
        if self._ending:
            return
        code = os.waitstatus_to_exitcode(status)
        if time.monotonic() - started < self._young_s:
            raise BatonError(f"router process {number} ended with {code} soon after its start")
        logger.error("router process %d ended with %d; another takes its place", number, code)
        self._start(number, ready_fd)

    def _start(self, number: int, ready_fd: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Otherwise a signal could arrive when a child is not recorded yet, or still has the parent's handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        pid = os.fork()
        if not pid:
            self._run_worker(number, ready_fd)
        self._running[pid] = number, time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _run_worker(self, number: int, ready_fd: int) -> NoReturn:
        status = 1

        def ready() -> None:
            os.write(ready_fd, b".")

        try:
            die_with_parent()
            for one in _HANDLED:
                signal.signal(one, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            self._serve(number, ready)
            status = 0
        except BatonError as error:
            logger.error("%s", error)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
