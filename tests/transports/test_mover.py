"""The copying thread, and cancellation during a copy."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from baton.kv.geometry import CopyList
from baton.transports.base import Operation
from baton.transports.mapped.mover import Mover


@pytest.mark.parametrize("offset", [0, 1])
def test_cancel_stops_a_copy_in_flight(offset: int) -> None:
    source, memory = np.ones(1 << 20, dtype=np.uint8), np.zeros((1 << 20) + 128, dtype=np.uint8)
    # Whole cache lines are copied in another way than a start inside one.
    begin = -memory.ctypes.data % 64 + offset
    dest = memory[begin : begin + source.size]
    # Minutes of work if it were not stopped: the same mebibyte over and over.
    runs = 2_000_000
    same = np.zeros(runs, dtype=np.int64)
    copies = CopyList(0, 0, same, same, np.full(runs, 1 << 20, dtype=np.int64))
    mover = Mover("test-mover")
    operation, queued = Operation("long"), Operation("queued")
    mover.submit(source, dest, copies, operation)
    mover.submit(source, dest, copies, queued)
    while operation.flags[1] == 0:
        threading.Event().wait(0.001)
    operation.flags[0] = queued.flags[0] = 1
    assert operation.wait(60) == "failed"
    assert queued.wait(60) == "failed"
    assert operation.error is not None
    assert operation.error.startswith("cancelled after ")
    assert 0 < operation.flags[1] < runs
    assert queued.flags[1] == 0
    dest[:] = 0
    mover.close()
    assert not dest.any()


def test_an_operation_ends_once() -> None:
    operation = Operation("tag")
    assert operation.poll() == "pending"
    assert operation.wait(0) == "pending"
    operation.end("first")
    operation.end()
    assert (operation.poll(), operation.error) == ("failed", "first")


class _Handing:
    """A lock at whose first release the copying thread gets its turn."""

    def __init__(self, operation: Operation) -> None:
        self.operation, self.lock, self.started = operation, threading.Lock(), None

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.started is None:
            self.started = False
            self.started = self.operation.start()


def test_no_copy_starts_between_the_look_and_the_end_of_a_withdrawal() -> None:
    operation = Operation("t")
    operation._lock = lock = _Handing(operation)  # type: ignore[assignment]
    operation.withdraw("cancelled")
    assert operation.poll() == "failed"
    assert lock.started is False, "bytes would move after the end"


def test_a_copy_under_way_is_not_withdrawn() -> None:
    operation = Operation("t")
    assert operation.start()
    operation.withdraw("cancelled")
    assert operation.poll() == "pending"
    operation.end()
    assert operation.poll() == "done"
