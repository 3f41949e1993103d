"""The greedy (argmax) tokens of rows, without logits of other rows than those that need them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.kernels.cpu.fused import fields as at
from baton.kernels.cpu.fused.choice import BEST_BYTES
from baton.kernels.cpu.fused.products import SCRATCH_BYTES
from baton.kernels.cpu.fused.stages import STAGE_BYTES
from baton.kernels.cpu.omp import Kernel, arguments, threads_for
from baton.kernels.cpu.tiles import may_use_tiles
from baton.models.fused_layers import BLOCK_ROWS, Int64, kernel_for, operand_width
from baton.models.layers.linear import Linear

# Weights worth one more thread.
_PARALLEL_WEIGHTS = 1 << 16


class FusedHead:
    """Bound to one packed LM head [V, E] in bfloat16 or int8. Not thread-safe."""

    def __init__(self, lm_head: Linear, kernel: Kernel) -> None:
        self._lm_head, self._kernel, fields = lm_head, kernel, np.zeros(at.NUM_FIELDS, dtype=np.int64)
        fields[at.HIDDEN], fields[at.VOCAB] = lm_head.in_features, lm_head.out_features
        fields[at.HEAD : at.HEAD + 3] = lm_head.in_place() or ()
        fields[at.CHECKS], fields[at.TILES] = 1, may_use_tiles()
        self._fields = fields

    @classmethod
    def of(cls, lm_head: Linear | None) -> FusedHead | None:
        """None if the weight is not packed."""
        kernel = None if lm_head is None else kernel_for([lm_head])
        return None if lm_head is None or kernel is None else cls(lm_head, kernel)

    def likeliest(self, hidden_NE: Tensor, kept: Int64) -> tuple[Int64, Tensor] | None:
        """The argmax token of each contiguous row, the first of equal ones (-1 if some logits are not finite), and
        float32 logits of the rows `kept`. None: compute logits instead.
        """
        if not len(hidden_NE) or not self._lm_head.few_rows_match():
            return None
        logits = torch.empty(len(kept), self._lm_head.out_features)
        places = np.zeros(len(hidden_NE), dtype=np.int64)
        places[kept] = logits.data_ptr() + np.arange(len(kept)) * logits.stride(0) * logits.itemsize
        chosen = np.empty(len(hidden_NE), dtype=np.int64)
        for start in range(0, len(hidden_NE), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            self._choose(hidden_NE[rows], places[rows], chosen[rows])
        return chosen, logits

    def _choose(self, hidden_NE: Tensor, places: Int64, chosen: Int64) -> None:
        num_rows = len(hidden_NE)
        threads = threads_for(self._lm_head.in_features * self._lm_head.out_features, _PARALLEL_WEIGHTS)
        scratch = torch.empty(threads * num_rows * (SCRATCH_BYTES + BEST_BYTES), dtype=torch.uint8)
        operand = torch.empty(num_rows * operand_width([self._lm_head]), dtype=torch.bfloat16)
        stages = np.zeros(at.STAGES_OF_DRAFTS * STAGE_BYTES // 8, dtype=np.int64)
        fields = self._fields.copy()
        fields[at.NUM_ROWS] = fields[at.NUM_SAMPLED] = num_rows
        fields[at.SCRATCH] = scratch.data_ptr()
        fields[at.BESTS] = fields[at.SCRATCH] + threads * num_rows * SCRATCH_BYTES
        fields[at.OPERAND], fields[at.LOGITS] = operand.data_ptr(), places.ctypes.data
        fields[at.OUTPUTS], fields[at.STAGES] = hidden_NE.data_ptr(), stages.ctypes.data
        fields[at.CHOSEN] = chosen.ctypes.data
        self._kernel.call(arguments(1, fields.ctypes.data), threads)
