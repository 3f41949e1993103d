"""The processes of ranks 1 and up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from baton.children import PYTHON, wait_or_kill
from baton.directories import RunDirectory
from baton.drafters.base import Drafter, reads_of
from baton.engine.config import EngineConfig
from baton.engine.memory.kv_memory import KVMemory
from baton.engine.ranks.collective import connect_ranks
from baton.engine.ranks.orders import (
    MAX_MESSAGE_BYTES,
    Allocate,
    Done,
    Failed,
    Order,
    Start,
    decode_answer,
    encode_message,
)
from baton.errors import EngineUnavailableError
from baton.models.layers.parallel import TensorRank
from baton.transports.mapped.segments import file_of

log = logging.getLogger(__name__)

END_LIMIT_S = 10.0
# A dying rank's connections close before its exit status shows.
EXIT_STATUS_LIMIT_S = 0.5


class Followers:
    """Ranks compute in lockstep: all answer an order before the next. If one fails, all end: its KV is unknown."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._size = config, config.num_ranks
        self._directory = RunDirectory("ranks-") if self._size > 1 else None
        self._store = str(self._directory and self._directory.path / "store")
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failure: str | None = None
        self._closing = False
        threads = max(1, torch.get_num_threads() // self._size)
        try:
            for rank in range(1, self._size):
                self._start(threads)
                self._send(rank, Start(config, rank, self._store))
        except BaseException:
            self.close()
            raise

    def _start(self, threads: int) -> None:
        here, there = Pipe()
        with there:
            process = subprocess.Popen(
                [*PYTHON, "-m", "baton.engine.ranks.worker", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                pass_fds=[there.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        self._pipes.append(here)
        self._processes.append(process)

    def join(self) -> TensorRank:
        """Waits for all ranks. Raises `EngineUnavailableError`."""
        try:
            return connect_ranks(self._config, self._store, 0)
        except RuntimeError as error:
            raise self.fail_after(error) from error

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end(cause)` from another thread when a process ends by itself."""
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._wait, args=(rank, process, on_end), daemon=True, name="baton-rank").start()

    def _wait(self, rank: int, process: subprocess.Popen[bytes], on_end: Callable[[str], None]) -> None:
        status = process.wait()
        if not self._closing:
            on_end(self.kill_all(f"rank {rank} ended with status {status}"))

    def send(self, message: Order) -> None:
        """Call `answered` next. Raises `EngineUnavailableError`."""
        data = encode_message(message)
        for rank in range(1, self._size):
            self._send(rank, data)

    def _send(self, rank: int, message: Order | bytes) -> None:
        if self._failure is not None:
            raise EngineUnavailableError(self._failure)
        try:
            self._pipes[rank - 1].send_bytes(message if isinstance(message, bytes) else encode_message(message))
        except OSError as error:
            raise EngineUnavailableError(self.kill_all(f"rank {rank} has gone: {error}")) from None

    def answered(self) -> list[Done]:
        """Waits for all answers. Raises `EngineUnavailableError`."""
        answers = []
        for rank, pipe in enumerate(self._pipes, 1):
            if self._failure is not None:
                raise EngineUnavailableError(self._failure)
            try:
                answer = decode_answer(pipe.recv_bytes(MAX_MESSAGE_BYTES))
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                raise EngineUnavailableError(self.kill_all(f"rank {rank} has gone: {error!r}")) from None
            if isinstance(answer, Failed):
                raise EngineUnavailableError(self.kill_all(f"rank {rank} failed: {answer.cause}"))
            assert isinstance(answer, Done)
            answers.append(answer)
        # Ranks that answer have connected; a process killed later leaves no file.
        self._remove_store()
        return answers

    def _remove_store(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def send_allocation(self, pool: KVMemory, drafter: Drafter | None) -> None:
        """Call `answered` next.

        Raises `EngineUnavailableError`, and `ConfigError` if other processes cannot access the pages.
        """
        aux_layers, reads = list(drafter.aux_layers) if drafter is not None else [], list(reads_of(drafter))
        for rank in range(1, self._size):
            files = None
            if pool.regions:
                named = zip(pool.parts[rank], pool.regions[rank], strict=True)
                files = {g.name: file_of(region) for (g, _), region in named if isinstance(region, np.ndarray)}
            self._send(rank, Allocate(dict(pool.size.num_pages), files, aux_layers, reads))

    def fail_after(self, error: Exception) -> EngineUnavailableError:
        """End all ranks after `error` in rank 0's part of an order. The exception names another rank as the cause if
        one has ended.
        """
        deadline = time.monotonic() + EXIT_STATUS_LIMIT_S
        while not self._closing and time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return EngineUnavailableError(self.kill_all(f"rank {rank} ended with status {process.returncode}"))
            time.sleep(0.01)
        return EngineUnavailableError(self.kill_all(f"rank 0 failed: {type(error).__name__}: {error}"))

    def kill_all(self, cause: str) -> str:
        """Returns the first cause."""
        if self._failure is None:
            self._failure = cause
            log.error("%s: the engine ends", cause)
            self._closing = True
            for process in self._processes:
                process.kill()
        return self._failure

    def close(self) -> None:
        """Closing the pipes ends the processes; kill them after `END_LIMIT_S`."""
        self._closing = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            wait_or_kill(process, END_LIMIT_S)
        self._remove_store()


def _has_fileno(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


def start_followers(config: EngineConfig, progress: Callable[[str], None]) -> Followers:
    """The other ranks load their weights while rank 0 loads its own."""
    if config.num_ranks > 1:
        progress(f"starting {config.num_ranks} ranks")
    return Followers(config)
