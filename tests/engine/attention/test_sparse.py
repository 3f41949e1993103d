"""The choice of keys for sparse attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.attention import sparse
from baton.engine.attention.base import AttnBatch
from baton.errors import BatonError
from baton.models.layer_cache import Chosen, IndexRows

HEADS, SIZE, TOP_K, LENGTH, PAGE = 3, 10, 6, 150, 7


def rows_of(dtype: torch.dtype = torch.float32) -> IndexRows:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(LENGTH, HEADS, SIZE, generator=generator).to(dtype)
    k = torch.randn(LENGTH, SIZE, generator=generator).to(dtype)
    return IndexRows(q, k, torch.randn(LENGTH, HEADS, generator=generator), TOP_K)


def part(rows: IndexRows, start: int, stop: int) -> IndexRows:
    return IndexRows(rows.q_THD[start:stop], rows.k_TD[start:stop], rows.weights_TH[start:stop], TOP_K)


def batch_of(start: int, stop: int) -> AttnBatch:
    pages = np.random.default_rng(0).permutation(np.arange(1, 30, dtype=np.int32))[None]
    return AttnBatch(np.array([0, stop - start], np.int32), np.arange(start, stop), pages)


def empty(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((30, 2, PAGE, 1, SIZE), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_keys_that_a_row_sees_are_chosen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(dtype)
    dots = torch.einsum("thd,sd->ths", rows.q_THD.double(), rows.k_TD.double()).clamp_min(0)
    scores = torch.einsum("th,ths->ts", rows.weights_TH.double(), dots)
    expected = [sorted(scores[t, : t + 1].topk(TOP_K).indices.tolist()) for t in range(TOP_K, LENGTH)]
    for on_cpu in (True, False):
        monkeypatch.setattr(sparse, "supports", lambda device, dtype, on_cpu=on_cpu: on_cpu)
        found = sparse.choose_keys(empty(dtype), 1, batch_of(0, LENGTH), rows)
        assert found.rows.tolist() == list(range(TOP_K, LENGTH)), "earlier rows see no more keys than are chosen"
        # Of keys with equal scores (0 if no head likes them) any may be chosen.
        for t, chosen, best in zip(found.rows, found.positions.tolist(), expected, strict=True):
            assert sorted(scores[t][chosen].tolist()) == pytest.approx(sorted(scores[t][best].tolist()), abs=1e-9)


def test_a_row_chooses_the_same_keys_in_every_chunk() -> None:
    rows = rows_of()
    whole = sparse.choose_keys(empty(), 0, batch_of(0, LENGTH), rows)
    plane, found = empty(), []
    for start, stop in ((0, 3), (3, 40), (40, 41), (41, LENGTH)):
        some: Chosen = sparse.choose_keys(plane, 0, batch_of(start, stop), part(rows, start, stop))
        found += [(int(row) + start, chosen) for row, chosen in zip(some.rows, some.positions.tolist(), strict=True)]
    assert found == list(zip(whole.rows.tolist(), whole.positions.tolist(), strict=True))


@pytest.mark.parametrize("page", [0, 30, -1])
def test_a_page_outside_the_plane_is_an_error(page: int) -> None:
    batch = batch_of(20, 22)
    batch.page_table[0, 1] = page  # of a key, not of a row's own slot
    with pytest.raises(BatonError, match="null page"):
        sparse.choose_keys(empty(), 0, batch, part(rows_of(), 20, 22))
