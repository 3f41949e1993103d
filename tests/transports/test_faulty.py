"""Each fault does what its table says, and affects only its targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from baton.kv.geometry import CopyList
from baton.transports.base import Operation, Peer, Transport
from baton.transports.registry import create_transport

PAGE = 64
SIZE = 16 * PAGE


@contextmanager
def pair(options: str) -> Iterator[tuple[Transport, Peer, list[np.ndarray], list[np.ndarray]]]:
    near, far = create_transport(f"faulty+local://?{options}"), create_transport("local://")
    try:
        own = [near.allocate(f"own {i}", SIZE) for i in range(2)]
        for i, region in enumerate(own):
            region[:] = np.random.default_rng(i).integers(0, 256, SIZE, dtype=np.uint8)
        near.register(own)
        theirs = [far.allocate(f"their {i}", SIZE) for i in range(2)]
        yield near, near.connect(far.register(theirs)).result(60), own, theirs
    finally:
        near.close()
        far.close()


def pages(source: list[int], dest: list[int], region: int = 0) -> CopyList:
    return CopyList(
        region,
        region,
        np.array(source, dtype=np.int64) * PAGE,
        np.array(dest, dtype=np.int64) * PAGE,
        np.full(len(source), PAGE, dtype=np.int64),
    )


def run(near: Transport, peer: Peer, copies: CopyList) -> Operation:
    operation = near.submit(peer, "write", copies, "t")
    assert operation.wait(60) != "pending"
    return operation


def test_drop_draft_drops_region_one_only() -> None:
    with pair("fault=drop-draft") as (near, peer, own, theirs):
        for region in range(2):
            assert run(near, peer, pages([1], [2], region)).poll() == "done"
        assert np.array_equal(theirs[0][2 * PAGE : 3 * PAGE], own[0][PAGE : 2 * PAGE])
        assert not theirs[1].any()


def test_every_counts_submissions() -> None:
    with pair("fault=drop&region=0&every=3") as (near, peer, _, theirs):
        for page in range(1, 8):
            run(near, peer, pages([page], [page]))
        assert [int(theirs[0][p * PAGE : (p + 1) * PAGE].any()) for p in range(1, 8)] == [0, 1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("size", ["", f"&page_bytes={PAGE}"])
def test_shift_page_reads_one_page_early(size: str) -> None:
    with pair(f"fault=shift-page{size}") as (near, peer, own, theirs):
        run(near, peer, pages([3, 5], [1, 7]))
        want = np.zeros_like(theirs[0])
        want[PAGE : 2 * PAGE] = own[0][2 * PAGE : 3 * PAGE]
        want[7 * PAGE : 8 * PAGE] = own[0][4 * PAGE : 5 * PAGE]
        assert np.array_equal(theirs[0], want)


def test_drop_last_page_cuts_a_coalesced_run() -> None:
    with pair(f"fault=drop-last-page&page_bytes={PAGE}") as (near, peer, own, theirs):
        columns = [np.array([value], dtype=np.int64) for value in (PAGE, 2 * PAGE, 3 * PAGE)]
        assert run(near, peer, CopyList(0, 0, *columns)).poll() == "done"
        assert np.array_equal(theirs[0][2 * PAGE : 4 * PAGE], own[0][PAGE : 3 * PAGE])
        assert not theirs[0][4 * PAGE :].any()


@pytest.mark.parametrize("count", [1, PAGE])
def test_corrupt_inverts_the_end_of_a_run(count: int) -> None:
    with pair(f"fault=corrupt&nbytes={count}") as (near, peer, own, theirs):
        assert run(near, peer, pages([1], [1])).poll() == "done"
        want = own[0][PAGE : 2 * PAGE].copy()
        want[PAGE - count :] ^= 0xFF
        assert np.array_equal(theirs[0][PAGE : 2 * PAGE], want)


def test_the_fault_fail_reports_an_error() -> None:
    with pair("fault=fail") as (near, peer, _, theirs):
        operation = run(near, peer, pages([1, 2], [1, 2]))
        assert (operation.poll(), operation.error) == ("failed", "injected failure")
        assert theirs[0][PAGE : 2 * PAGE].any()
        assert not theirs[0][2 * PAGE :].any()


@pytest.mark.parametrize("options", ["fault=duplicate", "fault=delay&delay_s=0.01"])
def test_duplicate_and_delay_still_copy(options: str) -> None:
    with pair(options) as (near, peer, own, theirs):
        assert run(near, peer, pages([4], [4])).poll() == "done"
        assert np.array_equal(theirs[0][4 * PAGE : 5 * PAGE], own[0][4 * PAGE : 5 * PAGE])


def test_reorder_lets_the_next_one_pass() -> None:
    with pair("fault=reorder&delay_s=60") as (near, peer, own, theirs):
        first = near.submit(peer, "write", pages([1], [9]), "first")
        second = near.submit(peer, "write", pages([2], [9]), "second")
        assert [first.wait(30), second.wait(30)] == ["done", "done"]
        assert np.array_equal(theirs[0][9 * PAGE : 10 * PAGE], own[0][PAGE : 2 * PAGE])


def test_cancel_of_a_delayed_operation_is_quiet_and_writes_nothing() -> None:
    with pair("fault=delay&delay_s=60") as (near, peer, _, theirs):
        operations = [near.submit(peer, "write", pages([p], [p]), "late") for p in (1, 2)]
        # The first waits inside its delay, the second in the queue after it.
        for operation in operations:
            near.cancel(operation)
        assert [operation.wait(30) for operation in operations] == ["failed", "failed"]
        assert not theirs[0].any()
