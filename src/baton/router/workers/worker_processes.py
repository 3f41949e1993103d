"""The processes of one router: forked, supervised, and ended together."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from baton.children import die_with_parent
from baton.errors import BatonError

logger = logging.getLogger(__name__)

_YOUNG_S = 5.0
_LOOK_S = 0.2
_PAUSE_S = 1.0
_SILENT_S = 30.0
_HANDLED = (signal.SIGTERM, signal.SIGINT)
_NUMBER_BYTES = 2
# Serves as process `number`, and calls the function when ready and each second from then on.
Serve = Callable[[int, Callable[[], None]], None]


class WorkerProcesses:
    """Processes that run `serve`. One that ends by itself is restarted, after `on_end(number)`. A silent one is killed:
    the kernel still gives it connections.

    They are forks: create no thread or event loop before.
    """

    def __init__(
        self,
        num: int,
        serve: Serve,
        on_end: Callable[[int], None] = lambda number: None,
        on_stop: Callable[[], None] = lambda: None,
        *,
        silent_s: float = _SILENT_S,
    ) -> None:
        """`on_stop` closes the listeners."""
        self._on_stop = on_stop
        self._num, self._serve, self._on_end, self._silent_s = num, serve, on_end, silent_s
        self._running: dict[int, tuple[int, float]] = {}  # number and start, by process id
        self._heard: dict[int, float] = {}  # when, by number
        self._looked = time.monotonic()
        self._ending = self._has_served = False

    def run(self, on_ready: Callable[[], None]) -> None:
        """Run until all have ended after SIGTERM or SIGINT, which is passed on.

        Raises `BatonError` if one ends before it is ready.
        """
        before = {number: signal.signal(number, self._pass_on) for number in _HANDLED}
        heard_pipe, alive_fd = os.pipe()
        os.set_blocking(alive_fd, False)
        try:
            for number in range(self._num):
                self._start(number, alive_fd)
            while self._running:
                self._listen(heard_pipe, _LOOK_S)
                if not self._has_served and len(self._heard) == self._num:
                    self._has_served = True
                    on_ready()
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid in self._running:  # PID 1 reaps orphans too
                    self._listen(heard_pipe, 0.0)
                    self._ended(pid, status, alive_fd)
                self._kill_silent()
        except BaseException:
            self._pass_on(signal.SIGTERM)
            while self._running:
                self._running.pop(os.waitpid(-1, 0)[0], None)
            raise
        finally:
            os.close(heard_pipe)
            os.close(alive_fd)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self, heard_pipe: int, wait_s: float) -> None:
        said = os.read(heard_pipe, 2**16) if select.select([heard_pipe], [], [], wait_s)[0] else b""
        now = time.monotonic()
        for start in range(0, len(said), _NUMBER_BYTES):
            self._heard[int.from_bytes(said[start : start + _NUMBER_BYTES], "big")] = now
        if now - self._looked > self._silent_s / 2:  # this process was stopped
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now

    def _kill_silent(self) -> None:
        for pid, (number, _) in self._running.items():
            if self._looked - self._heard.get(number, self._looked) > self._silent_s:
                logger.error("router process %d is silent for %.0f s: it is killed", number, self._silent_s)
                self._heard[number] = math.inf
                os.kill(pid, signal.SIGKILL)

    def _pass_on(self, number: int, frame: object = None) -> None:
        self._ending = True
        self._on_stop()
        for pid in self._running:
            os.kill(pid, number)

    def _ended(self, pid: int, status: int, alive_fd: int) -> None:
        number, started = self._running.pop(pid)
        was_ready = self._heard.pop(number, None) is not None
        self._on_end(number)
        if self._ending:
            return
        code = os.waitstatus_to_exitcode(status)
        if not was_ready and not (self._has_served and self._heard):
            raise BatonError(f"router process {number} ended with {code} before it was ready")
        logger.error("router process %d ended with %d; another takes its place", number, code)
        if time.monotonic() - started < _YOUNG_S:
            time.sleep(_PAUSE_S)
        self._start(number, alive_fd)

    def _start(self, number: int, alive_fd: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # No signal may arrive before a child is recorded and has its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        if not self._ending:
            pid = os.fork()
            if not pid:
                self._run_worker(number, alive_fd)
            self._running[pid] = number, time.monotonic()
            if self._ending:  # another thread took the signal
                os.kill(pid, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _run_worker(self, number: int, alive_fd: int) -> NoReturn:
        status = 1

        def alive() -> None:
            with contextlib.suppress(BlockingIOError):
                os.write(alive_fd, number.to_bytes(_NUMBER_BYTES, "big"))

        try:
            die_with_parent()
            for one in _HANDLED:
                signal.signal(one, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            self._serve(number, alive)
            status = 0
        except BatonError as error:
            logger.error("%s", error)
        except BaseException:
            traceback.print_exc()
        finally:
            logging.shutdown()  # writes pending lines
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
