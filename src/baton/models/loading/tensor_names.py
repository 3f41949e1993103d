"""Names of tensors in Hugging Face checkpoints, and tensors that join several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from baton.errors import CheckpointError

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def layer_index(name: str) -> int | None:
    """A tensor's layer; None outside the layers."""
    found = LAYER.match(name)
    return int(found[1]) if found else None


def split_rows(name: str, tensor: Tensor, parts: Mapping[str, int]) -> Iterable[tuple[str, Tensor]]:
    """Split a stored tensor into `parts` of so many rows. Raises `CheckpointError` if the rows do not add up."""
    rows = sum(parts.values())
    if tensor.dim() == 0 or len(tensor) != rows:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, expected {rows} rows")
    return zip(parts, torch.split(tensor, list(parts.values())), strict=True)
