"""Drafters by method, imported only when asked for. A head's directory has config.json and safetensors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

import torch

from baton.drafters.base import Drafter
from baton.errors import ConfigError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig
from baton.models.linear import Build
from baton.models.loader import read_config, resolve_dtype
from baton.models.registry import model_class

DRAFTERS = {
    "eagle": "baton.drafters.eagle:Eagle",
    "eagle3": "baton.drafters.eagle3:Eagle3",
}
# Heads of any target are Llama layers; some configs name no model type, or the method's own.
_HEAD_TYPES = ("eagle", "eagle3", None)


class DrafterLoader(Protocol):
    """What a registered class offers."""

    def load(self, path: str, raw: RawConfig, config: ModelConfig, target: CausalLM, build: Build) -> Drafter: ...


def load_drafter(
    method: str,
    path: str | Path,
    target: CausalLM,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
) -> Drafter:
    """Build a drafter for `target` and fill it; embeddings or LM head it lacks are the target's.

    "auto" is the target's dtype. Raises `ConfigError` for an unknown method, `CheckpointError` for anything
    wrong with the head's directory or a head that was made for another target.
    """
    if method not in DRAFTERS:
        raise ConfigError("speculative_config.method", f"{method!r} is unknown, expected one of {', '.join(DRAFTERS)}")
    raw = read_config(path)
    model_type = raw.get("model_type")
    config = model_class("llama" if model_type in _HEAD_TYPES else model_type).parse_config(raw)
    chosen = target.build.dtype if dtype == "auto" else resolve_dtype(dtype, raw)
    module, _, name = DRAFTERS[method].partition(":")
    loader: DrafterLoader = getattr(importlib.import_module(module), name)
    drafter = loader.load(str(path), raw, config, target, Build(chosen, torch.device(device), batch_invariant))
    return drafter.eval()
