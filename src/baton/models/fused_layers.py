"""A model's decoder layers over a few rows in one call (see `decoder_layers`), with the bits of the layers one by
one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from baton.kernels.cpu import decoder_layers as kernel
from baton.kernels.cpu.omp import arguments, float_bits, threads_for
from baton.kernels.cpu.small_gemm import MAX_ROWS
from baton.kernels.cpu.stages import STAGE_BYTES
from baton.models.cache import InPlaceCache, KVRegions, LayerCache, slot_error
from baton.models.layers.decoder_layer import MLP, Attention, DecoderLayer
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Linear

# Weights of a layer per thread.
_PARALLEL_WEIGHTS = 1 << 17

CosSin = tuple[Tensor, Tensor]


class FusedLayers:
    """`layers`: those of a whole model."""

    def __init__(self, layers: Sequence[DecoderLayer], rotary_of: Sequence[int]) -> None:
        first, mlp = layers[0].self_attn, layers[0].mlp
        assert isinstance(first, Attention)
        assert isinstance(mlp, MLP)
        self._layers, self._rotary_of = layers, np.array(rotary_of)
        self._heads, self._kv_heads, self._size, self._scale = (
            first.num_heads,
            first.num_kv_heads,
            first.head_dim,
            first.scale,
        )
        self._hidden, self._inner = first.qkv_proj.in_features, mlp.down_proj.in_features
        self._merged, self._eps = first.qkv_proj.out_features, _norms(layers[0])[0].eps
        self._linears = [linear for layer in layers for linear in _linears(layer)]
        self._table = np.array([_columns(layer) for layer in layers], dtype=np.int64)
        self._num_weights = sum(linear.in_features * linear.out_features for linear in _linears(layers[0]))

    @classmethod
    def of(cls, layers: Iterable[nn.Module], rotary_of: Sequence[int]) -> FusedLayers | None:
        """None if a layer is of another kind, or a weight is not packed."""
        found = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        if len(found) < len(rotary_of) or not all(map(_is_usual, found)):
            return None
        made = cls(found, rotary_of)
        return made if all(_shape(layer) == _shape(found[0]) for layer in found) else None

    def regions(self, x: Tensor, cache: LayerCache) -> KVRegions | None:
        """Keys and values for rows x [T, E]. None: the layers must run one by one."""
        if not isinstance(cache, InPlaceCache) or not 0 < len(x) <= MAX_ROWS or x.dtype is not torch.bfloat16:
            return None
        if not all(linear.few_rows_match() for linear in self._linears[:4]):
            return None
        regions = cache.regions()
        shape = self._kv_heads, self._size
        if regions is None or any(r.kv.dtype is not x.dtype or r.kv.shape[4:] != shape for r in regions.regions):
            return None
        return regions

    def run(self, x: Tensor, cos_sin: Sequence[CosSin], regions: KVRegions, kept: Mapping[int, Tensor]) -> None:
        """Replaces contiguous rows x [T, E] by the last layer's output. `kept`: tensors [T, E] that get the input of
        these layers. Raises `BatonError` for a slot in the null page or outside the page table."""
        num_rows, num_layers = len(x), len(self._layers)
        threads = threads_for(self._num_weights, _PARALLEL_WEIGHTS)
        table = self._filled(cos_sin, regions, kept)
        stages = np.zeros(num_layers * kernel.STAGES_PER_LAYER * STAGE_BYTES // 8, dtype=np.int64)
        scratch = torch.empty(threads * num_rows * kernel.SCRATCH_BYTES, dtype=torch.uint8)
        widths = self._hidden, self._merged, self._heads * self._size, self._inner
        normed, merged, attended, inners = (x.new_empty(num_rows, width) for width in widths)
        given = arguments(
            0, num_rows, len(regions.query_start) - 1, num_layers,
            self._hidden, self._heads, self._kv_heads, self._size, self._inner,
            float_bits(self._eps), float_bits(self._scale),
            int(regions.positions.ctypes.data), int(regions.query_start.ctypes.data),
            int(table.ctypes.data), int(stages.ctypes.data), scratch.data_ptr(),
            x.data_ptr(), normed.data_ptr(), merged.data_ptr(), attended.data_ptr(), inners.data_ptr(),
        )  # fmt: skip
        kernel.LAYERS.call(given, threads)
        if given[kernel.FAULT]:
            raise slot_error()

    def _filled(
        self, cos_sin: Sequence[CosSin], regions: KVRegions, kept: Mapping[int, Tensor]
    ) -> npt.NDArray[np.int64]:
        table: npt.NDArray[np.int64] = self._table.copy()
        places = np.array([regions.layers[i] for i in range(len(self._layers))])
        found = [
            (
                region.kv.data_ptr(),
                *region.kv.shape[:2],
                region.kv.shape[3],
                int(region.page_table.ctypes.data),
                region.page_table.shape[1],
            )
            for region in regions.regions
        ]
        table[:, kernel.KV : kernel.PAGE_COLUMNS + 1] = np.array(found)[places[:, 0]]
        table[:, kernel.KV_INDEX : kernel.WINDOW + 1] = places[:, 1:]
        rotaries = [(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in cos_sin]
        table[:, kernel.COS : kernel.HALF + 1] = np.array(rotaries)[self._rotary_of]
        for layer, tensor in kept.items():
            table[layer, kernel.FEATURES] = tensor.data_ptr()
        return table


def _linears(layer: DecoderLayer) -> list[Linear]:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, MLP)
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


def _norms(layer: DecoderLayer) -> list[RMSNorm]:
    attention = layer.self_attn
    assert isinstance(attention, Attention)
    norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm
    return [norm for norm in norms if isinstance(norm, RMSNorm)]


def _is_usual(layer: DecoderLayer) -> bool:
    """Whether the kernel computes this layer, on this machine."""
    attention, mlp = layer.self_attn, layer.mlp
    if type(layer) is not DecoderLayer or type(attention) is not Attention or type(mlp) is not MLP:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if attention.sinks is not None or not all(
        type(norm) is RMSNorm and norm.weight.dtype is torch.bfloat16 for norm in norms
    ):
        return False
    sizes = [attention.qkv_proj.out_features, attention.o_proj.out_features, mlp.down_proj.in_features]
    return not any(size % kernel.BLOCK for size in sizes) and all(
        linear.in_place() is not None for linear in _linears(layer)
    )


def _shape(layer: DecoderLayer) -> tuple[float, ...]:
    """Equal for all layers of a call."""
    attention = layer.self_attn
    assert isinstance(attention, Attention)
    sizes = [size for linear in _linears(layer) for size in (linear.in_features, linear.out_features)]
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale
    return (*sizes, *heads, *(float(norm.eps) for norm in _norms(layer)))


def _columns(layer: DecoderLayer) -> list[int]:
    """A layer's row of the kernel's table, as far as forwards do not change it."""
    attention, row = layer.self_attn, [0] * kernel.NUM_COLUMNS
    assert isinstance(attention, Attention)
    for column, linear in zip((kernel.QKV, kernel.OUT, kernel.GATE_UP, kernel.DOWN), _linears(layer), strict=True):
        row[column : column + 3] = linear.in_place() or ()
    norms = {
        kernel.INPUT_NORM: layer.input_layernorm,
        kernel.POST_NORM: layer.post_attention_layernorm,
        kernel.Q_NORM: attention.q_norm,
        kernel.K_NORM: attention.k_norm,
    }
    for column, norm in norms.items():
        row[column] = 0 if norm is None else norm.weight.data_ptr()
    return row
