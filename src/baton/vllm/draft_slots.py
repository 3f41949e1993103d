"""Blanks the slots that vLLM's V1 drafter keeps after a step.

In a dummy step `SpecDecodeBaseProposer.dummy_run` (vLLM 0.32 and 0.33) would write to the slots of the rank's last
request, whose blocks may be another's by now (docs/reference/vllm-design.md). Padding values make it write nothing. The
forward context holds views of it, so it is filled after the drafter's layers; the next real step fills it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# vLLM's `PADDING_SLOT_ID`, which kernels skip.
PADDING_SLOT = -1


class RememberedSlots:
    """The slot mappings of the drafter's layers `names`. Runs on vLLM's worker thread."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._buffers: dict[int, Tensor] = {}  # by address
        self._used = False

    def record(self, layer: str, slot_mappings: Any) -> None:
        """A layer ran with `slot_mappings`, the forward context's: by layer, int64 of any length; other types are not
        the drafter's."""
        if layer not in self._names or not isinstance(slot_mappings, Mapping):
            return
        view = slot_mappings.get(layer)
        if isinstance(view, Tensor):
            self._used = True
            storage = view.untyped_storage()
            if storage.data_ptr() not in self._buffers:
                with torch.inference_mode():
                    whole = torch.empty(0, dtype=view.dtype, device=view.device).set_(storage)
                self._buffers[storage.data_ptr()] = whole

    def blank(self) -> None:
        """Call after the step's drafts. On a GPU this is queued after them."""
        if self._used:
            with torch.inference_mode():
                for buffer in self._buffers.values():
                    buffer.fill_(PADDING_SLOT)
        self._used = False
