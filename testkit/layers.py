"""Random decoder layers and requests over pages, to compare their fused kernel with the layers one by one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.registry import get_backend
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS
from baton.kernels.cpu.gemm.wide_gemm import HAS_WIDE_PRODUCTS
from baton.models.config import ModelConfig, RopeSpec
from baton.models.layer_cache import AttnRows, KVRegion, KVRegions
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build, Linear

# Of bfloat16.
HAS_OWN_PRODUCTS = HAS_BF16_PAIRS or HAS_WIDE_PRODUCTS
PAGE_SIZE = 8
ROPE = RopeSpec("default", 10000.0, {})


@dataclass(frozen=True)
class LayerKind:
    """What layers may have beside weights. `rotary_dim` None: all of a head."""

    quantization: str | None = None
    qk_norm: bool = False
    bias: bool = False
    rotary_dim: int | None = None
    windows: tuple[int | None, ...] = (None, None)
    batch_invariant: bool = False
    dtype: torch.dtype = torch.bfloat16


def make_layers(kind: LayerKind, hidden: int, heads: tuple[int, int, int], inner: int, seed: int) -> list[DecoderLayer]:
    """`heads`: query heads, key heads, size."""
    config = config_of(kind, hidden, heads, inner)
    layers = [DecoderLayer(config, index, build_of(kind)) for index in range(len(kind.windows))]
    fill(nn.ModuleList(layers), seed)
    return layers


def config_of(
    kind: LayerKind, hidden: int, heads: tuple[int, int, int], inner: int, vocab_size: int = 64
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=inner, num_layers=len(kind.windows),
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], rms_eps=1e-5, max_position=512, rope=ROPE,
        windows=kind.windows, qkv_bias=kind.bias, o_bias=kind.bias, mlp_bias=kind.bias, qk_norm=kind.qk_norm,
        rotary_dim=kind.rotary_dim,
    )  # fmt: skip


def build_of(kind: LayerKind) -> Build:
    return Build(kind.dtype, torch.device("cpu"), kind.batch_invariant, quantization=kind.quantization)


@functools.cache
def runs_in_place(kind: LayerKind) -> bool:
    """Whether kernels for few rows read this kind's weights here. For AMX oneDNN packs bfloat16 in another layout."""
    linear = Linear(192, 320, build_of(kind))
    fill(linear, 0)
    return linear.in_place() is not None and linear.few_rows_match()


def skip_unless_in_place(kind: LayerKind) -> None:
    import pytest  # not for tools.kernel_check

    if kind.quantization is not None and not HAS_INT8_PRODUCTS:
        pytest.skip("no products of int8")
    if not runs_in_place(kind):
        pytest.skip("oneDNN packs these weights in another layout")


def usual_quantization() -> str | None:
    """Of layers that run in place: None, or "int8" where those of bfloat16 do not."""
    return None if runs_in_place(LayerKind()) else "int8"


def fill(module: nn.Module, seed: int) -> None:
    """Random weights."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            scale = 0.3 if isinstance(part, Linear) else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if isinstance(part, Linear):
            part.pack()


class PagedRequests:
    """Rows [start, stop) of some requests (`spans`), in a region for each window. Earlier tokens are random, and slots
    of no token NaN."""

    def __init__(
        self, kind: LayerKind, heads: tuple[int, int, int], spans: Sequence[tuple[int, int]], seed: int, ahead: int = 0
    ) -> None:
        """`ahead`: slots after the rows of each request."""
        columns = -(-(ahead + max(stop for _, stop in spans)) // PAGE_SIZE)
        generator = torch.Generator().manual_seed(seed)
        order = np.random.default_rng(seed)
        self._kind, self._backend, self._groups = (
            kind,
            get_backend("paged_cpu", "cpu"),
            sorted(set(kind.windows), key=str),
        )
        self.kv, self.batches = [], []
        counts = [stop - start for start, stop in spans]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        self.positions = np.concatenate([np.arange(*span) for span in spans])
        for window in self._groups:
            shape = (1 + columns * len(spans), kind.windows.count(window), 2, PAGE_SIZE, *heads[1:])
            kv = torch.full(shape, float("nan"), dtype=kind.dtype)
            table = order.permutation(np.arange(1, len(kv))).astype(np.int32).reshape(len(spans), columns)
            for pages, (start, _) in zip(table, spans, strict=True):
                tokens = np.arange(start)
                made = torch.randn(start, kv.shape[1], 2, *heads[1:], generator=generator)
                places = torch.from_numpy(pages[tokens // PAGE_SIZE]).long(), torch.from_numpy(tokens % PAGE_SIZE)
                kv.permute(0, 3, 1, 2, 4, 5)[places] = made.to(kind.dtype)
            self.kv.append(kv)
            self.batches.append(AttnBatch(starts, self.positions, table))

    def _place(self, layer: int) -> tuple[int, int]:
        """The layer's region, and its index there."""
        window = self._kind.windows[layer]
        return self._groups.index(window), self._kind.windows[:layer].count(window)

    def __call__(self, layer_id: int, rows: AttnRows) -> Tensor:
        region, index = self._place(layer_id)
        batch, window = self.batches[region], self._kind.windows[layer_id]
        return self._backend.write_and_attend(self.kv[region], index, rows, batch, window)

    def write(self, layer_id: int, k: Tensor, v: Tensor) -> None:
        self(layer_id, AttnRows(k, k, v, 1.0))

    def bind(self, requests: np.ndarray, positions: np.ndarray, query_start: np.ndarray) -> PagedRequests:
        """As `drafters.base.Pages`."""
        bound = copy.copy(self)
        bound.positions = positions
        bound.batches = [AttnBatch(query_start, positions, batch.page_table[requests]) for batch in self.batches]
        return bound

    def regions(self) -> KVRegions:
        found = tuple(KVRegion(kv, batch.page_table) for kv, batch in zip(self.kv, self.batches, strict=True))
        layers = np.array([(*self._place(i), window or 0) for i, window in enumerate(self._kind.windows)])
        return KVRegions(self.batches[0].query_start, self.positions, found, layers)
