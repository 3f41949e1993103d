"""Decoder layers in one call (see `kernels.cpu.fused`), bitwise equal to the layers one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from baton.kernels.cpu.fused import fields as at
from baton.kernels.cpu.fused.choice import BEST_BYTES
from baton.kernels.cpu.fused.passes import RUN_BFLOAT16, RUN_INT8
from baton.kernels.cpu.fused.products import BLOCK, SCRATCH_BYTES
from baton.kernels.cpu.fused.rows import ELEMENT_BYTES
from baton.kernels.cpu.fused.stages import STAGE_BYTES
from baton.kernels.cpu.gemm.small_gemm import MAX_ROWS
from baton.kernels.cpu.omp import Kernel, arguments, float_bits, threads_for
from baton.kernels.cpu.tiles import may_use_tiles
from baton.models.layer_cache import InPlaceCache, KVRegions, LayerCache, slot_error
from baton.models.layers.decoder_layer import MLP, Attention, DecoderLayer, FusionLayer
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Linear
from baton.models.layers.rotary import Rotary

# Rows of a block.
BLOCK_ROWS = 512
# Pieces of the narrowest product per thread. With fewer, oneDNN is faster for more than `MAX_ROWS` rows.
_LEAST_PIECES = 4
# Weights of a layer worth one more thread.
_PARALLEL_WEIGHTS = 1 << 17

Int64 = npt.NDArray[np.int64]
Layer = DecoderLayer | FusionLayer


class Work:
    """Memory of a call; `fields` has its addresses."""

    def __init__(self, fields: Int64, capacity: int, threads: int, widths: Mapping[int, int]) -> None:
        self.capacity, self.threads, self.fields = capacity, threads, fields.copy()
        self._scratch = torch.empty(threads * capacity * SCRATCH_BYTES, dtype=torch.uint8)
        self._bests = torch.empty(threads * capacity * BEST_BYTES, dtype=torch.uint8)
        self._rows = {name: torch.empty(capacity, width, dtype=torch.bfloat16) for name, width in widths.items()}
        self.fields[at.SCRATCH], self.fields[at.BESTS] = self._scratch.data_ptr(), self._bests.data_ptr()
        for name, tensor in self._rows.items():
            self.fields[name] = tensor.data_ptr()


class FusedLayers:
    """`layers`: those of a whole model or drafter."""

    def __init__(self, layers: Sequence[Layer], rotary_of: Sequence[int], kernel: Kernel) -> None:
        self.kernel = kernel
        first, mlp = _attention(layers[0]), layers[0].mlp
        assert isinstance(mlp, MLP)
        self.hidden, inner = first.o_proj.out_features, mlp.down_proj.in_features
        self.eps = eps_of(layers[0].post_attention_layernorm)
        self._shape = first.num_kv_heads, first.head_dim
        # A drafter's first layer reads two rows side by side.
        wide = max(_attention(layer).qkv_proj.in_features for layer in layers)
        self.widths = {
            at.NORMED: wide,
            at.MERGED: first.qkv_proj.out_features,
            at.ATTENDED: first.num_heads * first.head_dim,
            at.INNERS: inner,
        }
        self._linears = [linear for layer in layers for linear in _linears(layer)]
        self.widths[at.OPERAND] = operand_width(self._linears)
        self._table = np.array([_columns(*one) for one in zip(layers, rotary_of, strict=True)], dtype=np.int64)
        self._no_features = np.zeros(len(layers), dtype=np.int64)
        self._num_weights = sum(linear.in_features * linear.out_features for linear in _linears(layers[0]))
        self.fields = np.zeros(at.NUM_FIELDS, dtype=np.int64)
        self._work: Work | None = None
        for name, value in {
            at.NUM_LAYERS: len(layers),
            at.HIDDEN: self.hidden,
            at.HEADS: first.num_heads,
            at.KV_HEADS: first.num_kv_heads,
            at.SIZE: first.head_dim,
            at.INNER: inner,
            at.EPS: float_bits(self.eps),
            at.SCALE: float_bits(first.scale),
            at.TILES: may_use_tiles(),
            at.LAYERS: int(self._table.ctypes.data),
            at.FEATURES: int(self._no_features.ctypes.data),
        }.items():
            self.fields[name] = value

    @classmethod
    def of(cls, layers: Iterable[nn.Module], rotary_of: Sequence[int]) -> FusedLayers | None:
        """None for layers of another kind, or without `kernel_for`."""
        decoder_layers = [layer for layer in layers if isinstance(layer, Layer)]
        if len(decoder_layers) < len(rotary_of) or not all(map(_is_usual, decoder_layers)):
            return None
        kernel = kernel_for(linear for layer in decoder_layers for linear in _linears(layer))
        if kernel is None or len({_shape(layer) for layer in decoder_layers}) > 1:
            return None
        return cls(decoder_layers, rotary_of, kernel)

    def regions(self, num_rows: int, cache: LayerCache) -> KVRegions | None:
        """Keys and values for the rows. None: layers run one by one."""
        if num_rows == 0 or not self._is_fast(num_rows) or not isinstance(cache, InPlaceCache):
            return None
        if not all(linear.few_rows_match() for linear in self._linears[:8]):
            return None
        regions = cache.regions()
        if regions is None or any(
            r.kv.dtype is not torch.bfloat16 or r.kv.shape[4:] != self._shape for r in regions.regions
        ):
            return None
        return regions

    def _is_fast(self, num_rows: int) -> bool:
        threads = self._num_threads()
        return num_rows <= MAX_ROWS or threads == 1 or self.hidden >= BLOCK * _LEAST_PIECES * threads

    def _num_threads(self) -> int:
        return threads_for(self._num_weights, _PARALLEL_WEIGHTS)

    def run(
        self,
        x: Tensor,
        rotaries: Sequence[Rotary],
        regions: KVRegions,
        kept: Mapping[int, Tensor],
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        """Replaces contiguous rows x [T, E] by the last layer's output. `kept`: tensors [T, E] that get the input of
        these layers. Raises `BatonError` for a bad slot.
        """
        num_layers = len(self._table)
        for start in range(0, len(x), block_rows):
            rows = slice(start, min(start + block_rows, len(x)))
            block = regions if len(x) <= block_rows else regions.block(rows.start, rows.stop)
            inputs = {layer: tensor[rows] for layer, tensor in kept.items()}
            ends = rows.stop == len(x) and regions.wrote is not None
            # The others are copied while the last layer is computed.
            cuts = sorted({0, num_layers - 1, num_layers} if ends else {0, num_layers})
            for layers in itertools.starmap(range, itertools.pairwise(cuts)):
                self._run(x[rows], rotaries, block, inputs, layers)
                if regions.wrote is not None:
                    regions.wrote(layers, rows.stop)

    def _run(
        self,
        x: Tensor,
        rotaries: Sequence[Rotary],
        regions: KVRegions,
        kept: Mapping[int, Tensor],
        layers: range,
    ) -> None:
        work = self.take_work(len(x))
        fields = work.fields.copy()
        features = self._no_features.copy()
        for layer, tensor in kept.items():
            features[layer] = tensor.data_ptr()
        part = slice(layers.start, layers.stop)
        fields[at.X], fields[at.FEATURES] = x.data_ptr(), features[part].ctypes.data
        fields[at.NUM_LAYERS], fields[at.LAYERS] = len(layers), self._table[part].ctypes.data
        tables = rotary_tables(rotaries, int(regions.positions.max()))
        held = self.place(fields, replace(regions, layers=regions.layers[part]), regions.positions, tables)
        self.call(work, fields[None], held, features)

    def place(self, fields: Int64, regions: KVRegions, angles: Int64, rotaries: RotaryTables) -> object:
        """Set where a pass's rows are. Returns what holds the arrays."""
        table = np.array(
            [
                (
                    region.kv.data_ptr(),
                    *region.kv.shape[:2],
                    region.kv.shape[3],
                    region.page_table.ctypes.data,
                    region.page_table.shape[1],
                )
                for region in regions.regions
            ],
            dtype=np.int64,
        )
        fields[at.NUM_ROWS], fields[at.NUM_REQUESTS] = len(angles), len(regions.query_start) - 1
        fields[at.POSITIONS], fields[at.ANGLES] = regions.positions.ctypes.data, angles.ctypes.data
        fields[at.QUERY_START], fields[at.PLACES] = regions.query_start.ctypes.data, regions.layers.ctypes.data
        fields[at.REGIONS], fields[at.ROTARIES] = table.ctypes.data, rotaries[0].ctypes.data
        return table, regions, angles, rotaries

    def take_work(self, num_rows: int) -> Work:
        threads = self._num_threads()
        work, self._work = self._work, None
        if work is None or work.capacity < num_rows or work.threads < threads:
            work = Work(self.fields, num_rows, threads, self.widths)
        return work

    def call(self, work: Work, passes: Int64, *held: object) -> None:
        """`held`: objects whose addresses are in `passes` [P, NUM_FIELDS]. Raises `BatonError` for a bad slot."""
        per_pass = (len(self._table) * at.STAGES_PER_LAYER + at.STAGES_OF_DRAFTS) * STAGE_BYTES
        stages = np.zeros(len(passes) * per_pass // 8, dtype=np.int64)
        passes[:, at.STAGES] = stages.ctypes.data + per_pass * np.arange(len(passes))
        threads = min(work.threads, self._num_threads())
        self.kernel.call(arguments(len(passes), passes.ctypes.data), threads)
        self._work = work
        if passes[:, at.FAULT].any():
            raise slot_error()


RotaryTables = tuple[Int64, list[tuple[Tensor, Tensor]]]


def rotary_tables(rotaries: Sequence[Rotary], last: int) -> RotaryTables:
    tables = [rotary.tables(last) for rotary in rotaries]
    rows = [(cos.data_ptr(), sin.data_ptr(), cos.shape[1], len(cos)) for cos, sin in tables]
    return np.array(rows, dtype=np.int64), tables


def _attention(layer: Layer) -> Attention:
    assert isinstance(layer.self_attn, Attention)
    return layer.self_attn


def _linears(layer: Layer) -> list[Linear]:
    attention, mlp = _attention(layer), layer.mlp
    assert isinstance(mlp, MLP)
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


def _norms(layer: Layer) -> dict[int, nn.Module | None]:
    attention = _attention(layer)
    return {
        at.INPUT_NORM: layer.input_layernorm,
        at.POST_NORM: layer.post_attention_layernorm,
        at.Q_NORM: attention.q_norm,
        at.K_NORM: attention.k_norm,
        at.HIDDEN_NORM: layer.hidden_norm if isinstance(layer, FusionLayer) else None,
    }


def _is_usual(layer: Layer) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    kinds = type(layer) in (DecoderLayer, FusionLayer), type(attention) is Attention, type(mlp) is MLP
    if not all(kinds) or layer.input_layernorm is None or _attention(layer).sinks is not None:
        return False
    norms = [norm for norm in _norms(layer).values() if norm is not None]
    if not all(type(norm) is RMSNorm and norm.weight.dtype is torch.bfloat16 for norm in norms):
        return False
    if len(set(map(eps_of, norms))) > 1:
        return False
    qkv, out, _, down = _linears(layer)
    return not any(size % BLOCK for size in (qkv.out_features, out.out_features, down.in_features))


def _shape(layer: Layer) -> tuple[float, ...]:
    """Properties that all layers of a call must share."""
    attention = _attention(layer)
    sizes = [size for linear in _linears(layer) for size in (linear.in_features, linear.out_features)]
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale
    return (*sizes[1:], *heads, eps_of(layer.post_attention_layernorm))


def kernel_for(linears: Iterable[Linear]) -> Kernel | None:
    """None if not all are packed alike."""
    places = [linear.in_place() for linear in linears]
    found = {RUN_INT8 if place[1] else RUN_BFLOAT16 for place in places if place is not None}
    return found.pop() if len(found) == 1 and None not in places else None


def operand_width(linears: Iterable[Linear]) -> int:
    return max(linear.operand_bytes for linear in linears) // ELEMENT_BYTES


def eps_of(norm: nn.Module) -> float:
    assert isinstance(norm, RMSNorm)
    return float(norm.eps)


def _columns(layer: Layer, rotary: int) -> list[int]:
    row = [0] * at.NUM_COLUMNS
    for column, linear in zip((at.QKV, at.OUT, at.GATE_UP, at.DOWN), _linears(layer), strict=True):
        row[column : column + 3] = linear.in_place() or ()
    for column, norm in _norms(layer).items():
        row[column] = norm.weight.data_ptr() if isinstance(norm, RMSNorm) else 0
    row[at.ROTARY] = rotary
    row[at.ADDS_NORMED] = int(isinstance(layer, FusionLayer) and layer.norm_before_residual)
    return row
