"""Quantised weights of checkpoints, dequantised while they are loaded."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.loading.schemes import Scheme

# Stored tensors that change no weight.
_IGNORED = (
    *("input_scale", "activation_scale", "input_zero_point", "input_global_scale", "output_scale"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point"),
)


class QuantizedWeights:
    """Joins the parts of quantised weights, in any order."""

    def __init__(self, scheme: Scheme, names: Collection[str]) -> None:
        """`names`: all stored."""
        self.scheme = scheme.name
        self._scheme, self._names = scheme, frozenset(names)
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def name(self, stored: str) -> str | None:
        """The weight that a stored tensor is a part of, or its own name. None: ignored."""
        stem, _, part = stored.rpartition(".")
        if part in _IGNORED:
            return None
        return f"{stem}.weight" if self._is_part(stem, part) else stored

    def is_early(self, stored: str) -> bool:
        """Whether values of this small tensor decide what goes where."""
        return stored.rpartition(".")[2] in self._scheme.early or self._is_bias(stored)

    def add(self, stored: str, tensor: Tensor) -> Tensor | None:
        """The weight after its last part, on the meta device if a part is; None before; other tensors unchanged."""
        stem, _, part = stored.rpartition(".")
        if not self._is_part(stem, part):
            return tensor
        parts = self._waiting.setdefault(stem, {})
        parts[part] = tensor
        try:
            if len(parts) < len(self._parts(stem)):
                return None
            del self._waiting[stem]
            shape = self._scheme.shape(parts)
            if any(one.is_meta for one in parts.values()):
                return torch.empty(shape, device="meta")
            return self._scheme.dequantise(parts)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {stem}.weight, quantised by {self._scheme.name}: {error}") from None

    def is_empty_bias(self, stored: str, values: Tensor) -> bool:
        """GPTQ's tools write biases of zeros for layers without one."""
        return self._is_bias(stored) and not bool(values.any())

    def _is_bias(self, stored: str) -> bool:
        stem, _, part = stored.rpartition(".")
        return part == "bias" and self.scheme == "gptq" and f"{stem}.{self._scheme.mark}" in self._names

    def _is_part(self, stem: str, part: str) -> bool:
        scheme = self._scheme
        return part in (*scheme.needed, *scheme.optional) and f"{stem}.{scheme.mark}" in self._names

    def _parts(self, stem: str) -> list[str]:
        for name in self._scheme.needed:
            if f"{stem}.{name}" not in self._names:
                raise CheckpointError(f"{name} is missing")
        every = (*self._scheme.needed, *self._scheme.optional)
        return [name for name in every if f"{stem}.{name}" in self._names]
