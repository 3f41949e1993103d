"""Weights are moved into huge pages, and stay what they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from baton.kernels.huge_pages import HUGE_PAGE_SIZE, collapse, pages_of, size_in
from baton.models.layers.linear import Build, Linear
from baton.models.loading.huge_pages import use_huge_pages
from baton.own_memory import madvise


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
