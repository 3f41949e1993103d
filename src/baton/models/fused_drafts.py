"""All passes of an EAGLE-3 head for one step in one call, bitwise equal to its modules one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.kernels.cpu.fused import fields as at
from baton.kernels.cpu.gemm.small_gemm import MAX_ROWS
from baton.models.fused_layers import FusedLayers, Int64, eps_of, kernel_for, operand_width, rotary_tables
from baton.models.layer_cache import KVRegions, LayerCache
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Linear
from baton.models.layers.rotary import Rotary

__all__ = ["MAX_ROWS", "DraftHead", "DraftPass", "FusedDrafts"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftPass:
    """`sources`: in a later pass, each row's sampled row in the pass before; None: the same number. `noises`: as
    `drafters.base.DraftNoise`.
    """

    regions: KVRegions
    positions: Int64  # [T]
    sampled: Int64 | None  # [N]; None: all rows
    num_sampled: int
    sources: Int64 | None = None  # [T]
    temperatures: FloatArray | None = None  # [N]
    noises: Sequence[FloatArray | None] = ()


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A draft head without its layers. `feeds_normed`: the next pass continues from the norm's output."""

    embedding: Tensor
    fc: Linear | None
    norm: RMSNorm
    feeds_normed: bool
    lm_head: Linear
    target_ids: Tensor | None


class FusedDrafts:
    """Bound to one head: its weights must not move. Not thread-safe."""

    def __init__(self, layers: FusedLayers, rotary: Rotary, head: DraftHead) -> None:
        self._layers, self._rotary, self._head = layers, rotary, head
        vocab, size = head.lm_head.out_features, layers.hidden
        layers.widths |= {at.X: size, at.OUTPUTS: size, at.FEEDBACK: size}
        beside = operand_width([head.lm_head] if head.fc is None else [head.lm_head, head.fc])
        layers.widths[at.OPERAND] = max(layers.widths[at.OPERAND], beside)
        fields = layers.fields
        fields[at.EMBEDDING], fields[at.VOCAB] = head.embedding.data_ptr(), vocab
        fields[at.FINAL_NORM], fields[at.FEEDS_NORMED] = head.norm.weight.data_ptr(), head.feeds_normed
        fields[at.HEAD : at.HEAD + 3] = head.lm_head.in_place() or ()
        if head.fc is not None:
            fields[at.FC : at.FC + 3] = head.fc.in_place() or ()
            fields[at.FEATURES_WIDTH] = head.fc.in_features
        fields[at.TARGET_IDS] = 0 if head.target_ids is None else head.target_ids.data_ptr()

    @classmethod
    def of(cls, layers: FusedLayers | None, rotary: Rotary, head: DraftHead) -> FusedDrafts | None:
        """None for parts of another kind."""
        norm, lm_head, embedding = head.norm, head.lm_head, head.embedding
        linears = [lm_head, head.fc] if head.fc is not None else [lm_head]
        if layers is None or kernel_for(linears) is not layers.kernel or lm_head.in_features != layers.hidden:
            return None
        kinds = type(norm) is RMSNorm, norm.weight.dtype is torch.bfloat16, embedding.dtype is torch.bfloat16
        fits = eps_of(norm) == layers.eps and embedding.is_contiguous() and embedding.shape[1] == layers.hidden
        return cls(layers, rotary, head) if all(kinds) and fits else None

    def regions(self, num_rows: int, cache: LayerCache) -> KVRegions | None:
        fc, lm_head = self._head.fc, self._head.lm_head
        match = num_rows <= MAX_ROWS and lm_head.few_rows_match() and (fc is None or fc.few_rows_match())
        return self._layers.regions(num_rows, cache) if match else None

    def run(
        self, ids: Int64, features_TF: Tensor, passes: Sequence[DraftPass], margins: Sequence[FloatArray] = ()
    ) -> list[Int64]:
        """The chosen target ids of each pass, [N]. `ids` [T] and features, contiguous, are of the first pass's rows.
        `margins` [N], one for each pass, are filled. Raises `BatonError` for a bad slot.
        """
        work = self._layers.take_work(max(len(one.positions) for one in passes))
        fields = np.tile(work.fields, (len(passes), 1))
        rotary = rotary_tables([self._rotary], max(int(one.positions.max()) for one in passes))
        chosen = [np.empty(one.num_sampled, dtype=np.int64) for one in passes]
        held: list[object] = [ids, features_TF, rotary]
        for number, (one, row, tokens) in enumerate(zip(passes, fields, chosen, strict=True)):
            held.append(self._layers.place(row, one.regions, one.positions, rotary))
            before = chosen[number - 1] if number else ids
            row[at.STATES], row[at.IDS] = row[at.FEEDBACK], before.ctypes.data
            row[at.NUM_SAMPLED], row[at.CHOSEN] = one.num_sampled, tokens.ctypes.data
            if one.sampled is not None:
                row[at.SAMPLED] = one.sampled.ctypes.data
            if one.sources is not None:
                row[at.SOURCES] = one.sources.ctypes.data
            if one.temperatures is not None:
                noises = np.array([0 if noise is None else noise.ctypes.data for noise in one.noises], dtype=np.int64)
                row[at.NOISES], row[at.TEMPERATURES] = noises.ctypes.data, one.temperatures.ctypes.data
                held.append(noises)
            if margins:
                row[at.MARGINS] = margins[number].ctypes.data
        fields[0, at.STATES if self._head.fc is None else at.FEATURES_IN] = features_TF.data_ptr()
        self._layers.call(work, fields, held)
        return chosen
