"""The greedy (argmax) tokens of a few rows, without logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.kernels.cpu.fused import fields as at
from baton.kernels.cpu.fused.products import BLOCK, SCRATCH_BYTES
from baton.kernels.cpu.fused.stages import STAGE_BYTES
from baton.kernels.cpu.gemm.small_gemm import MAX_ROWS
from baton.kernels.cpu.omp import Kernel, arguments, threads_for
from baton.kernels.cpu.tiles import may_use_tiles
from baton.models.fused_layers import kernel_for, operand_width
from baton.models.layers.linear import Linear

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

# Weights worth one more thread.
_PARALLEL_WEIGHTS = 1 << 16
# Bytes of a piece's best score, that score's token, and the second score.
BEST_BYTES = 24


class FusedHead:
    """Bound to one packed LM head [V, E] in bfloat16 or int8. Not thread-safe."""

    def __init__(self, lm_head: Linear, kernel: Kernel) -> None:
        self._lm_head, self._kernel, fields = lm_head, kernel, np.zeros(at.NUM_FIELDS, dtype=np.int64)
        fields[at.HIDDEN], fields[at.VOCAB] = lm_head.in_features, lm_head.out_features
        fields[at.HEAD : at.HEAD + 3] = lm_head.in_place() or ()
        fields[at.CHECKS], fields[at.TILES] = 1, may_use_tiles()
        self._fields, self._num_pieces = fields, lm_head.out_features // BLOCK + 1

    @classmethod
    def of(cls, lm_head: Linear | None) -> FusedHead | None:
        """None if the weight is not packed."""
        kernel = None if lm_head is None else kernel_for([lm_head])
        return None if lm_head is None or kernel is None else cls(lm_head, kernel)

    def likeliest(self, hidden_NE: Tensor) -> npt.NDArray[np.int64] | None:
        """The argmax token of each contiguous row, the first of equal ones; -1 if some logits are not finite. None:
        compute logits instead.
        """
        num_rows = len(hidden_NE)
        if not 0 < num_rows <= MAX_ROWS or not self._lm_head.few_rows_match():
            return None
        threads = threads_for(self._lm_head.in_features * self._lm_head.out_features, _PARALLEL_WEIGHTS)
        scratch = torch.empty(threads * num_rows * SCRATCH_BYTES, dtype=torch.uint8)
        operand = torch.empty(num_rows * operand_width([self._lm_head]), dtype=torch.bfloat16)
        bests = torch.empty(num_rows * self._num_pieces * BEST_BYTES, dtype=torch.uint8)
        stages = np.zeros(at.STAGES_OF_DRAFTS * STAGE_BYTES // 8, dtype=np.int64)
        fields, chosen = self._fields.copy(), np.empty(num_rows, dtype=np.int64)
        fields[at.NUM_ROWS] = fields[at.NUM_SAMPLED] = num_rows
        fields[at.SCRATCH], fields[at.BESTS] = scratch.data_ptr(), bests.data_ptr()
        fields[at.OPERAND] = operand.data_ptr()
        fields[at.OUTPUTS], fields[at.STAGES] = hidden_NE.data_ptr(), stages.ctypes.data
        fields[at.CHOSEN] = chosen.ctypes.data
        self._kernel.call(arguments(1, fields.ctypes.data), threads)
        return chosen
