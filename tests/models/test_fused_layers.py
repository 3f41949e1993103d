"""Decoder layers in one call give each row the bits of the layers one by one, and write the same keys and values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.errors import BatonError
from baton.kernels.cpu.gemm.small_gemm import MAX_ROWS
from baton.models.fused_layers import BLOCK_ROWS, FusedLayers
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.rotary import Rotary
from baton.sampling_params import SamplingParams
from testkit.engines import stepped
from testkit.layers import (
    HAS_OWN_PRODUCTS,
    ROPE,
    LayerKind,
    PagedRequests,
    make_layers,
    skip_unless_in_place,
    usual_quantization,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="no products of bfloat16 of our own"),
]
HIDDEN, HEADS, INNER = 192, (6, 2, 32), 320
KINDS = {
    "plain": LayerKind(),
    "int8": LayerKind(quantization="int8"),
    "norms and biases": LayerKind(qk_norm=True, bias=True),
    "windows and half a rotation": LayerKind(windows=(None, 20, None), rotary_dim=16),
    "batch-invariant": LayerKind(batch_invariant=True),
}
BATCHES = {
    "one row": [(70, 71)],
    "first row": [(0, 1)],
    "verifications": [(5, 9), (130, 133), (64, 65)],
    "eight requests": [(3 * i, 3 * i + 1) for i in range(8)],
    "a prompt and others": [(0, 40), (63, 64), (9, 12)],
}
# Of more rows than a block has, with pieces enough for two threads.
WIDE = 512
LONG_BATCHES = {"a prompt": [(0, 128)], "parts of prompts, and a row": [(5, 60), (0, 100), (70, 71), (64, 130)]}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def one_by_one(layers: list[DecoderLayer], x: Tensor, cos_sin: Any, cache: PagedRequests) -> list[Tensor]:
    """Each layer's input, and the last one's output."""
    seen = [x]
    for layer in layers:
        seen.append(layer(seen[-1], cos_sin, cache))
    return seen


def rotary_of(kind: LayerKind) -> Rotary:
    return Rotary(ROPE, kind.rotary_dim or HEADS[2], 512, kind.dtype, torch.device("cpu"))


def prepared(
    kind: LayerKind, hidden: int, requests: list[tuple[int, int]]
) -> tuple[list[DecoderLayer], FusedLayers, PagedRequests, Tensor, Rotary]:
    """Also rows [T, hidden] of the requests."""
    skip_unless_in_place(kind)
    layers = make_layers(kind, hidden, HEADS, INNER, seed=3)
    fused = FusedLayers.of(layers, [0] * len(layers))
    assert fused is not None
    cache = PagedRequests(kind, HEADS, requests, seed=5)
    x = torch.randn(len(cache.positions), hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
    return layers, fused, cache, x, rotary_of(kind)


def assert_same_kv(cache: PagedRequests, other: PagedRequests) -> None:
    for mine, others in zip(cache.kv, other.kv, strict=True):
        assert torch.equal(mine.view(torch.int16), others.view(torch.int16))


def has_same_kv(cache: PagedRequests, other: PagedRequests, layer: int) -> bool:
    region, index, _ = cache.regions().layers[layer].tolist()
    mine, others = (one.kv[region][:, index].contiguous().view(torch.int16) for one in (cache, other))
    return torch.equal(mine, others)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_and_pages_have_the_bits_of_layers_one_by_one(kind: str, batch: str, threads: int) -> None:
    layers, fused, cache, x, rotary = prepared(KINDS[kind], HIDDEN, BATCHES[batch])
    other = copy.deepcopy(cache)
    expected = one_by_one(layers, x, rotary.at(torch.from_numpy(cache.positions)), other)
    regions = fused.regions(len(x), cache)  # type: ignore[arg-type]
    assert regions is not None
    kept, out = {0: torch.empty_like(x), 1: torch.empty_like(x)}, x.clone()
    fused.run(out, [rotary], regions, kept)
    assert torch.equal(out, expected[-1])
    assert torch.equal(kept[0], expected[0])
    assert torch.equal(kept[1], expected[1])
    assert_same_kv(cache, other)


@pytest.mark.parametrize("block_rows", [MAX_ROWS, BLOCK_ROWS])
@pytest.mark.parametrize("batch", LONG_BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_blocks_of_rows_have_the_bits_of_layers_one_by_one(
    kind: str, batch: str, block_rows: int, threads: int
) -> None:
    layers, fused, cache, x, rotary = prepared(KINDS[kind], WIDE, LONG_BATCHES[batch])
    other, num_rows = copy.deepcopy(cache), len(x)
    cos, sin = rotary.at(torch.from_numpy(cache.positions))
    expected, after = [], {}
    for start in range(0, num_rows, MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        expected.append(one_by_one(layers, x[rows], (cos[rows], sin[rows]), rows_of(other, rows)))
        after[min(rows.stop, num_rows)] = copy.deepcopy(other)
    regions = fused.regions(num_rows, cache)  # type: ignore[arg-type]
    assert regions is not None
    kept, out = {1: torch.empty_like(x)}, x.clone()
    told: list[tuple[range, int]] = []
    written: list[list[bool]] = []

    def wrote(some: range, rows: int) -> None:
        told.append((some, rows))
        written.append([has_same_kv(cache, after[rows], layer) for layer in range(len(layers))])

    fused.run(out, [rotary], dataclasses.replace(regions, wrote=wrote), kept, block_rows)
    last, blocks = len(layers) - 1, range(block_rows, num_rows, block_rows)
    whole = [(range(last), num_rows), (range(last, last + 1), num_rows)]
    assert told == [*((range(last + 1), rows) for rows in blocks), *whole]
    # The last layer of the last rows is still missing at first.
    assert written == [*([True] * (last + 1) for _ in blocks), [True] * last + [False], [True] * (last + 1)]
    assert torch.equal(out, torch.cat([seen[-1] for seen in expected]))
    assert torch.equal(kept[1], torch.cat([seen[1] for seen in expected]))
    assert_same_kv(cache, other)


@torch.inference_mode()
def test_one_layer_is_reported_once() -> None:
    _, fused, cache, x, rotary = prepared(LayerKind(usual_quantization(), windows=(None,)), HIDDEN, [(0, 5)])
    regions, told = fused.regions(len(x), cache), list[tuple[range, int]]()
    assert regions is not None
    fused.run(x, [rotary], dataclasses.replace(regions, wrote=lambda *some: told.append(some)), {})
    assert told == [(range(1), 5)]


def rows_of(cache: PagedRequests, rows: slice) -> PagedRequests:
    """By another way than `KVRegions.block`."""
    requests = np.repeat(np.arange(len(cache.batches[0].query_start) - 1), np.diff(cache.batches[0].query_start))[rows]
    present, counts = np.unique(requests, return_counts=True)
    return cache.bind(present, cache.positions[rows], np.cumsum([0, *counts]).astype(np.int32))


@torch.inference_mode()
def test_a_slot_that_does_not_exist_is_an_error_and_nothing_is_written(threads: int) -> None:
    kind = LayerKind(usual_quantization())
    layers = make_layers(kind, HIDDEN, HEADS, INNER, seed=3)
    fused = FusedLayers.of(layers, [0] * len(layers))
    assert fused is not None
    cache = PagedRequests(kind, HEADS, [(3, 4), (9, 11)], seed=5)
    cache.batches[0].page_table[1, 1] = 0
    before = cache.kv[0].clone()
    x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(BatonError, match="null page"):
        fused.run(x, [rotary_of(kind)], cache.regions(), {})
    assert torch.equal(cache.kv[0].view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize(
    ("kind", "hidden", "inner"),
    [(LayerKind(dtype=torch.float32), HIDDEN, INNER), (LayerKind(), 96, INNER), (LayerKind(), HIDDEN, 352)],
    ids=["float32", "outputs of half a block", "inner width of half a block"],
)
def test_other_layers_are_called_one_by_one(kind: LayerKind, hidden: int, inner: int) -> None:
    assert FusedLayers.of(make_layers(kind, hidden, HEADS, inner, seed=3), [0, 0]) is None


def test_an_engine_fuses_the_layers_of_prompts_and_tokens(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing but its speed would show that it no longer does."""
    path: Path = checkpoint("llama", torch_dtype="bfloat16", intermediate_size=192)
    rows: list[int] = []
    run = FusedLayers.run
    monkeypatch.setattr(FusedLayers, "run", lambda self, x, *rest: (rows.append(len(x)), run(self, x, *rest)))
    settings = {"batch_invariant": False, "quantization": usual_quantization()}
    with stepped(model=str(path), speculative_config=None, **settings) as one:
        prompt = [3 + i % 90 for i in range(600)]
        one.run("a", prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert rows == [600, 1, 1]
