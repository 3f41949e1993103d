"""Weights are moved into huge pages, and stay what they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from baton.models.layers.linear import Build, Linear
from baton.models.loading.huge_pages import (
    HUGE_PAGE_SIZE,
    collapse,
    madvise,
    pages_of,
    runs_of,
    size_in,
    use_huge_pages,
)


def test_each_page_that_holds_a_weight_is_moved_once() -> None:
    assert pages_of([(5, 10), (14, 2), (40, 20)], 10) == [0, 1, 4, 5]
    calls: list[tuple[int, int, int]] = []

    def advise(address: int, size: int, what: int) -> int:
        calls.append((address, size, what))
        return -1 if address == 0 else 0

    assert collapse([0, 1, 3, 4, 5], 10, advise) == 3, "one call has failed"
    assert calls == [(start, size, what) for what in (14, 25) for start, size in ((0, 20), (30, 30))]


def test_calls_are_for_few_pages() -> None:
    assert runs_of(range(7, 77)) == [(7, 32), (39, 32), (71, 6)]


def test_start_up_waits_for_some_pages_only() -> None:
    seconds = iter([0.0, 0.0, 0.9, 1.1])
    moved: list[int] = []

    def advise(address: int, size: int, what: int) -> int:
        moved.append(what)
        return 0

    collapse([1, 3, 5, 7], 10, advise, lambda: next(seconds))
    assert moved == [14] * 4 + [25] * 2


@pytest.mark.parametrize("text", [None, "", "no number", "0"])
def test_a_system_that_hides_the_size_of_huge_pages_has_none(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "hpage_pmd_size"
    if text is None:
        file.mkdir()  # cannot be read, even by root
    else:
        file.write_text(text)
    assert size_in(file) is None


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_a_packed_weight_is_in_huge_pages() -> None:
    def num_huge() -> int:
        found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        return int(found[1]) if found else 0

    layer = Linear(1024, 4096, Build(torch.bfloat16, torch.device("cpu")))
    assert layer.weight is not None
    layer.weight.copy_(torch.randn(4096, 1024))
    rows = torch.randn(3, 1024, dtype=torch.bfloat16)
    layer.pack()
    expected, before = layer(rows), num_huge()
    use_huge_pages([layer, None])
    assert num_huge() == before, "few bytes stay in the caches"
    for _ in range(5):  # a call fails where one page is in use elsewhere at that moment
        use_huge_pages([layer, None], least_bytes=1)
        assert torch.equal(layer(rows), expected)
        if num_huge() - before >= 4 * 1024:
            return
    size, place, before = size_in(HUGE_PAGE_SIZE), layer.in_place(), num_huge()
    if place is not None and size is not None:
        pages = pages_of([(place[0], 2 * 1024 * 4096)], size)[1:-1]
        if collapse(pages, size, madvise()) == len(pages) and num_huge() == before:
            return  # in huge pages from the start: memory that another weight has left
    control, before = torch.ones(4 << 20), num_huge()
    if place is not None and size is not None:
        collapse(pages_of([(control.data_ptr(), control.nbytes)], size)[1:-1], size, madvise())
    if num_huge() - before >= 8 * 1024:
        pytest.fail("this system has huge pages, and gave the weight none")
    pytest.skip("no packed weights, or few huge pages, on this machine")
