"""`baton serve --data-parallel-size N`: one server process per rank."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from baton.children import end_processes, start_reporting
from baton.deployment import BATON, Reporter, read_reports, read_rest
from baton.directories import RunDirectory
from baton.errors import ConfigError, EngineUnavailableError
from baton.openai.http.serving import bind

_LOOK_S = 0.1
_TRIES = 50


@contextlib.contextmanager
def free_ports(host: str, port: int, count: int) -> Iterator[list[int]]:
    """`port` and those after it, or for 0 any in a row. Nobody gets them but by `bind`. Raises `ConfigError`."""
    with contextlib.ExitStack() as kept:
        for left in reversed(range(_TRIES if port == 0 else 1)):
            with contextlib.ExitStack() as tried:
                try:
                    listeners = [tried.enter_context(contextlib.closing(bind(host, port)))]
                    first = listeners[0].getsockname()[1]
                    for number in range(first + 1, first + count):
                        listeners.append(tried.enter_context(contextlib.closing(bind(host, number))))
                except ConfigError:
                    if left == 0:
                        raise
                    continue
                families = [(listener.family, listener.getsockname()) for listener in listeners]
            for family, address in families:
                holder = kept.enter_context(socket.socket(family))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):  # taken meanwhile
                    holder.bind(address)
            break
        yield list(range(first, first + count))


class DataRanks:
    """The processes of all ranks, with this command's flags and a few for their rank. If one ends by itself, all
    end.
    """

    def __init__(self, size: int, engine_id: str, ports: Sequence[int], engines_per_host: int) -> None:
        # Of files that ranks find each other by.
        self._directory = RunDirectory("data-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        self._signalled = 0
        try:
            for rank in range(size):
                own = {
                    "--data-parallel-rank": str(rank),
                    "--data-parallel-store": str(self._directory.path),
                    "--engine-id": f"{engine_id}_dp{rank}",
                    "--port": str(ports[rank]),
                    "--engines-per-host": str(engines_per_host * size),
                }
                self._start([text for flag in own.items() for text in flag], size)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise EngineUnavailableError(f"a process could not be started: {error}") from error
            raise

    def _start(self, flags: list[str], size: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        # Ranks that share a terminal report by lines.
        environment = {"OMP_NUM_THREADS": str(max(1, cores // size)), **os.environ, "TQDM_DISABLE": "1"}
        process, pipe = start_reporting([*BATON, *sys.argv[1:], *flags], environment)
        self._pipes.append(pipe)
        self._processes.append(process)

    def await_ready(self, reporter: Reporter) -> tuple[list[str], str]:
        """Returns all URLs and one rank's KV capacity. If a rank ends before, raises the `ConfigError` of a rank that
        refuses a setting, else `EngineUnavailableError`."""
        urls: dict[int, str] = {}
        kv, pending = "", [b""] * len(self._pipes)
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(urls) < len(self._pipes):
                for key, _ in selector.select():
                    rank = key.data
                    reports, pending[rank] = read_reports(self._pipes[rank], pending[rank])
                    if reports is None:
                        self._processes[rank].wait()
                        if self._signalled:
                            raise SystemExit(128 + self._signalled)
                        # The failed rank may be another one.
                        for other, left in zip(self._pipes, pending, strict=True):
                            _check(read_rest(other, left))
                        raise EngineUnavailableError(self._end_of(rank))
                    _check(reports)
                    for report in reports:
                        if "ready" in report:
                            urls[rank], kv = report["ready"], report["kv"]
                            selector.unregister(key.fileobj)
                        elif "progress" in report and "again" not in report:
                            reporter.progress(f"rank {rank}: {report['progress']}")
        return [urls[rank] for rank in range(len(urls))], kv

    def wait(self) -> None:
        """Wait for all ranks to end after a signal. Raises `EngineUnavailableError` as soon as one ends by itself."""
        while True:
            ended = {rank: status for rank, one in enumerate(self._processes) if (status := one.poll()) is not None}
            if ended and not self._signalled:
                # A killed rank has a negative status; the others end soon after it.
                raise EngineUnavailableError(self._end_of(min(ended, key=lambda rank: ended[rank])))
            if len(ended) == len(self._processes):
                break
            time.sleep(_LOOK_S)
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode != 0]
        if failed:
            raise EngineUnavailableError(self._end_of(failed[0]))

    def _end_of(self, rank: int) -> str:
        return f"data-parallel rank {rank} ended with status {self._processes[rank].returncode}"

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forward SIGTERM and SIGINT to all ranks. Main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = number
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def close(self) -> None:
        """Kill ranks that got no signal: none can end cleanly without the others."""
        for process in self._processes:
            if not self._signalled and process.poll() is None:
                process.kill()
        end_processes(self._processes)
        for pipe in self._pipes:
            os.close(pipe)
        self._directory.close()


def _check(reports: Sequence[Mapping[str, Any]]) -> None:
    for report in reports:
        if "refused" in report:
            raise ConfigError(report["refused"], report["why"])
