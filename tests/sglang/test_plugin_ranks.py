"""An MLA target with an MHA drafter between different numbers of tensor ranks, on buffers of SGLang's layout.

SGLang itself cannot slice the drafter's heads beside latents: with more prefill ranks than decode ranks, the others are
dummies and their shards are never sent; with fewer, the strides are wrong.
"""

from __future__ import annotations

import numpy as np
import pytest

from baton.handoff.plan.planner import plan_copies
from baton.handoff.plan.topology import senders
from baton.kv.interval import Interval
from baton.kv.spec import Owner
from baton.plugin_base.regions import host_region
from baton.sglang.geometry import BufferLayout, KvBuffer, PagePart, describe_buffers, rules_of

TOKENS, HEADS, DIM, LATENT = 21, 4, 8, 12
HIT = 3
Arrays = dict[str, np.ndarray]


def engine(num_ranks: int, page_size: int, num_pages: int, data_rank: int = 0) -> list[tuple[BufferLayout, Arrays]]:
    """Per tensor rank its layout and zeroed buffers: latents whole, the drafter's K and V by heads."""
    share = HEADS // num_ranks
    shapes = {"target.latent.0": (1, LATENT), "draft.k.0": (share, DIM), "draft.v.0": (share, DIM)}
    found = []
    for rank in range(num_ranks):
        arrays = {name: np.zeros((num_pages * page_size, *shape), dtype=np.float32) for name, shape in shapes.items()}
        buffers = []
        for name, array in arrays.items():
            owner: Owner = "target" if name.startswith("target") else "draft"
            part, (heads, dim) = name.split(".")[1], shapes[name]
            whole = part == "latent"
            parts = (
                PagePart(part, "float32", "whole" if whole else "heads", heads, dim, 0 if whole else rank * share),
            )
            place = (array.ctypes.data, array.nbytes, page_size * heads * dim * 4)
            buffers.append(KvBuffer(owner, part, 0, *place, parts, rules_of(owner, "mla" if whole else "full")))
        turn = data_rank * num_ranks + rank
        found.append((describe_buffers(buffers, page_size, rank, host_region, turn), arrays))
    return found


def slots(pages: list[int], page_size: int) -> np.ndarray:
    """The slot of each token."""
    tokens = np.arange(TOKENS)
    return np.asarray(pages)[tokens // page_size] * page_size + tokens % page_size


@pytest.mark.parametrize(
    ("prefill", "decode", "latents_from", "heads_from"),
    [
        # P with attention over 2 ranks; D with 2 data-parallel ranks of 1.
        (2, (1, 1), [(0,), (1,)], [(0, 1), (0, 1)]),
        # P is one of 2 data-parallel ranks of 1; D attends over 2 ranks.
        (1, (2,), [(0,), (0,)], [(0,), (0,)]),
        # 4 ranks as 2 data-parallel ranks of 2 on D, 1 of 4 on P.
        (4, (2, 2), [(0,), (1,), (2,), (3,)], [(0, 1), (2, 3), (0, 1), (2, 3)]),
    ],
)
def test_data_parallel_ranks_of_attention_get_their_latents_from_different_ranks(
    prefill: int, decode: tuple[int, ...], latents_from: list[tuple[int, ...]], heads_from: list[tuple[int, ...]]
) -> None:
    """Each data-parallel rank is an engine of its own; without turns all would load P's rank 0."""
    sources = [layout for layout, _ in engine(prefill, 4, 8)]
    found: dict[str, list[tuple[int, ...]]] = {"target.latent.0": [], "draft.k.0": []}
    for data_rank, num_ranks in enumerate(decode):
        for layout, _ in engine(num_ranks, 2, 16, data_rank):
            for name, of in found.items():
                of.append(senders([each.geometries[name] for each in sources], layout.geometries[name]))
    assert found == {"target.latent.0": latents_from, "draft.k.0": heads_from}


@pytest.mark.parametrize(
    ("prefill", "decode", "latents_from", "heads_from"),
    [
        (1, 1, [(0,)], [(0,)]),
        (1, 2, [(0,), (0,)], [(0,), (0,)]),
        (2, 1, [(0,)], [(0, 1)]),
        (2, 2, [(0,), (1,)], [(0,), (1,)]),
        (4, 2, [(0,), (1,)], [(0, 1), (2, 3)]),
        (2, 4, [(0,), (1,), (0,), (1,)], [(0,), (0,), (1,), (1,)]),
    ],
)
def test_latents_come_once_and_the_drafters_heads_from_every_rank_that_has_them(
    prefill: int, decode: int, latents_from: list[tuple[int, ...]], heads_from: list[tuple[int, ...]]
) -> None:
    source, target = engine(prefill, 4, 8), engine(decode, 2, 16)
    source_pages, target_pages = [6, 1, 4, 2, 7, 3], [5, 9, 2, 14, 3, 11, 8, 1, 13, 4, 7]
    rng = np.random.default_rng(0)
    whole = {"target.latent.0": rng.random((TOKENS, 1, LATENT), dtype=np.float32)}
    whole |= {name: rng.random((TOKENS, HEADS, DIM), dtype=np.float32) for name in ("draft.k.0", "draft.v.0")}
    for rank, (_, arrays) in enumerate(source):
        for name, array in arrays.items():
            first = 0 if name.startswith("target") else rank * array.shape[1]
            array[slots(source_pages, 4)] = whole[name][:, first : first + array.shape[1]]
    for rank, (layout, arrays) in enumerate(target):
        wanted = layout.wanted(TOKENS, HIT)
        assert wanted == dict.fromkeys(layout.rules, Interval(HIT, TOKENS))
        for name, array in arrays.items():
            sources, dest = [each.geometries[name] for each, _ in source], layout.geometries[name]
            expected_senders = latents_from[rank] if name.startswith("target") else heads_from[rank]
            assert senders(sources, dest) == expected_senders
            copies = plan_copies(sources, dest, source_pages, target_pages, wanted[name])
            assert tuple(copies) == expected_senders
            for sender, copy in copies.items():
                have = source[sender][1][name].reshape(-1).view(np.uint8)
                into = array.reshape(-1).view(np.uint8)
                for start, end, size in zip(copy.source_offset, copy.dest_offset, copy.nbytes, strict=True):
                    into[end : end + size] = have[start : start + size]
            first = 0 if name.startswith("target") else rank * array.shape[1]
            want = np.zeros_like(array)
            want[slots(target_pages, 2)[HIT:]] = whole[name][HIT:, first : first + array.shape[1]]
            assert (array == want).all(), f"{name} of rank {rank}"
