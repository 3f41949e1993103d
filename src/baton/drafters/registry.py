"""Drafters by method, imported on first use."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from baton.drafters.base import Drafter
from baton.drafters.methods import DRAFTERS
from baton.errors import ConfigError
from baton.models.base import CausalLM
from baton.models.layers.linear import Build
from baton.models.loading.dtypes import resolve_dtype


class DrafterLoader(Protocol):
    def load(self, path: str, target: CausalLM, build: Build, **options: int) -> Drafter: ...


def load_drafter(
    method: str,
    path: str | Path,
    target: CausalLM,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
    options: Mapping[str, int] | None = None,
    quantization: str | None = None,
) -> Drafter:
    """A drafter uses the target's embeddings or LM head if it has none.

    `path`: the drafter's checkpoint, or the target's for a method without one. `dtype` "auto" is the target's.
    `options`: settings of the method. Raises `ConfigError` for an unknown method, `CheckpointError` for a bad
    checkpoint or one of another target.
    """
    if method not in DRAFTERS:
        raise ConfigError("speculative_config.method", f"{method!r} is unknown, expected one of {', '.join(DRAFTERS)}")
    chosen = target.build.dtype if dtype == "auto" else resolve_dtype(dtype, {})
    loader: DrafterLoader = pkgutil.resolve_name(DRAFTERS[method])
    build = Build(chosen, torch.device(device), batch_invariant, quantization=quantization)
    return loader.load(str(path), target, build, **(options or {}))
