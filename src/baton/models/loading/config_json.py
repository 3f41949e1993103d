"""Reads `config.json`. Without torch, as `checkpoint_files`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.checkpoint_files import read_json
from baton.errors import CheckpointError
from baton.models.config import RawConfig
from baton.models.registry import MODELS

# Outer fields that the nested config of a text model may inherit.
_BESIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")


def read_config(path: str | Path) -> dict[str, Any]:
    """Raises `CheckpointError`."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory")
    return read_json(directory / "config.json")


def text_config(raw: RawConfig) -> RawConfig:
    """The config of the text model, which a checkpoint of text and images nests; else `raw`."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping) or _is_known(raw) or not _is_known(inner):
        return raw
    beside = {name: raw[name] for name in _BESIDE if raw.get(name) is not None and inner.get(name) is None}
    return {**inner, **beside}


def _is_known(raw: RawConfig) -> bool:
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in MODELS
