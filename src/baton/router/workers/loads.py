"""Load on engines from each process of one router, and the number of requests each runs.

All processes map the same memory, and each writes its own row. A reader may see a leg's update in part, which at most
changes a choice.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.router.workers.binding import SharedBinding

# Load on further engines is not shared.
MAX_ENGINES = 1024
_CELL_BYTES, _ENGINE_CELLS = 8, 4
_ROW_CELLS = 1 + _ENGINE_CELLS * MAX_ENGINES
# Maximum age of what is known of other processes.
_FRESH_S = 0.002


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """Load of other processes on one engine, as `PooledEngine` counts it."""

    num_inflight: int = 0
    queued_tokens: int = 0
    kv_tokens: int = 0


NO_LOAD = OtherLoad()


class EngineWithLoad(Protocol):
    """A `PooledEngine`."""

    num_inflight: int
    queued_tokens: int
    kv_tokens: int
    others: OtherLoad

    @property
    def url(self) -> str: ...


class LoadTable:
    """Create it before processes are forked."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._memory = mmap.mmap(-1, num_workers * _ROW_CELLS * _CELL_BYTES)
        self.cells = memoryview(self._memory).cast("q")
        self.binding = SharedBinding()

    def clear(self, worker: int) -> None:
        """Clear the row of a process that has ended."""
        first = worker * _ROW_CELLS
        self.cells[first : first + _ROW_CELLS] = memoryview(bytes(_ROW_CELLS * _CELL_BYTES)).cast("q")


class WorkerLoads:
    """The row that process `worker` writes, and those that it reads."""

    def __init__(
        self,
        table: LoadTable,
        worker: int,
        clock: Callable[[], float] = time.monotonic,
        max_engines: int = MAX_ENGINES,
    ) -> None:
        self.binding = table.binding
        self._max_engines = max_engines
        self._cells, self._worker, self._num = table.cells, worker, table.num_workers
        self._first = worker * _ROW_CELLS
        self._clock, self._read_at = clock, float("-inf")
        self._slots: dict[str, int] = {}

    def run(self, num_running: int) -> None:
        self._cells[self._first] = num_running

    @property
    def num_running_elsewhere(self) -> int:
        return sum(self._cells[other * _ROW_CELLS] for other in range(self._num) if other != self._worker)

    def publish(self, engine: EngineWithLoad) -> None:
        slot = self._slots.get(engine.url)
        if slot is None and (slot := self._new_slot(engine.url)) is None:
            return
        self._cells[slot + 1], self._cells[slot + 2] = engine.num_inflight, engine.queued_tokens
        self._cells[slot + 3] = engine.kv_tokens

    def read(self, engines: Iterable[EngineWithLoad]) -> None:
        now = self._clock()
        if now - self._read_at < _FRESH_S:
            return
        self._read_at = now
        loads = self._other_loads()
        for engine in engines:
            counts = loads.get(_key(engine.url))
            engine.others = NO_LOAD if counts is None else OtherLoad(*counts)

    def _other_loads(self) -> dict[int, list[int]]:
        slots: dict[int, list[int]] = {}
        for other in range(self._num):
            if other == self._worker:
                continue
            first = other * _ROW_CELLS + 1
            for slot in range(first, first + _ENGINE_CELLS * MAX_ENGINES, _ENGINE_CELLS):
                key = self._cells[slot]
                if not key:
                    break  # slots are used in order
                counts = slots.setdefault(key, [0, 0, 0])
                for place in range(3):
                    counts[place] += self._cells[slot + 1 + place]
        return slots

    def _new_slot(self, url: str) -> int | None:
        slot = self._first + 1 + _ENGINE_CELLS * len(self._slots)
        if len(self._slots) == self._max_engines:
            idle = [name for name, taken in self._slots.items() if not any(self._cells[taken + 1 : taken + 4])]
            if not idle:
                return None
            slot = self._slots.pop(idle[0])
        self._slots[url] = slot
        self._cells[slot] = _key(url)
        return slot


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """`directory`: of all sockets."""

    number: int
    num: int
    directory: Path
    loads: WorkerLoads

    def socket(self, number: int) -> str:
        return str(self.directory / str(number))


@functools.lru_cache(maxsize=2 * MAX_ENGINES)
def _key(url: str) -> int:
    """Never 0."""
    return int.from_bytes(hashlib.blake2b(url.encode(), digest_size=_CELL_BYTES).digest(), "big") >> 1 | 1
