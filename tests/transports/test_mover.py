"""The compiled loop, and cancellation while it copies."""

from __future__ import annotations

import threading

import numpy as np

from baton.kv.geometry import CopyList
from baton.transports.base import Operation
from baton.transports.mover import CHUNK_BYTES, Mover, copy_runs


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_runs_longer_than_a_chunk() -> None:
    source = np.random.default_rng(0).integers(0, 256, 3 * CHUNK_BYTES, dtype=np.uint8)
    dest = np.zeros_like(source)
    flags = np.zeros(2, dtype=np.int64)
    copies = CopyList(0, 0, column(5, 0), column(1, 0), column(2 * CHUNK_BYTES + 17, 1))
    assert copy_runs(source, dest, copies, flags) == 2
    assert flags.tolist() == [0, 2]
    want = np.zeros_like(source)
    want[1 : 2 * CHUNK_BYTES + 18] = source[5 : 2 * CHUNK_BYTES + 22]
    want[0] = source[0]
    assert np.array_equal(dest, want)


def test_a_set_flag_stops_before_the_next_byte() -> None:
    source, dest = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    copies = CopyList(0, 0, column(0, 8), column(0, 8), column(8, 8))
    assert copy_runs(source, dest, copies, column(1, 0)) == 0
    assert not dest.any()


def test_read_only_columns() -> None:
    columns = [column(0, 4), column(4, 0), column(4, 4)]
    for each in columns:
        each.setflags(write=False)
    source, dest = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    assert copy_runs(source, dest, CopyList(0, 0, *columns), column(0, 0)) == 2
    assert dest.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


def test_cancel_stops_a_copy_in_flight() -> None:
    source, dest = np.ones(1 << 20, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)
    # Minutes of work, were it not stopped: the same mebibyte over and over.
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
