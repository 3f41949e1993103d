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
    match = LAYER.match(name)
    return int(match[1]) if match else None


def split_rows(name: str, tensor: Tensor, parts: Mapping[str, int]) -> Iterable[tuple[str, Tensor]]:
    """`parts`: numbers of rows. Raises `CheckpointError`."""
    rows = sum(parts.values())
    if tensor.dim() == 0 or len(tensor) != rows:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, expected {rows} rows")
    return zip(parts, torch.split(tensor, list(parts.values())), strict=True)


def split_experts(name: str, tensor: Tensor, num_experts: int, size: int) -> Iterable[tuple[str, Tensor]]:
    """Each expert's weights in a stacked tensor: `gate_up_proj` [X, 2 I, E], gates first, or `down_proj` [X, E, I], for
    experts of inner size I = `size`. Raises `CheckpointError`.
    """
    owner, _, kind = name.rpartition(".")
    if tensor.dim() != 3 or len(tensor) != num_experts:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, expected {num_experts} experts")
    for expert, values in enumerate(tensor):
        if kind == "down_proj":
            yield f"{owner}.{expert}.down_proj.weight", values
            continue
        for part, rows in split_rows(name, values, {"gate_proj": size, "up_proj": size}):
            yield f"{owner}.{expert}.{part}.weight", rows
