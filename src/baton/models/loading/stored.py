"""The tensors of a checkpoint directory, by the model's names: those that transformers would load."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.checkpoint_files import read_json
from baton.errors import CheckpointError
from baton.models.config import ModelConfig
from baton.models.loading.deepseek_names import MARK as DEEPSEEK_V4
from baton.models.loading.deepseek_names import usual_name as deepseek_name
from baton.models.loading.gguf_names import GGUF_FILE
from baton.models.loading.tensor_names import LAYER, layer_index

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Prefixes of a text model in a checkpoint of text and images.
_NESTED = ("model.language_model.", "language_model.model.")
# Nemotron-H's prefixes, and the usual ones.
_BACKBONE = {"backbone.": "model.", "model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}
_HEAD_PARTS = "lm_head."
# A part of the name of one tensor of each MTP module that is stored as a layer.
_MTP = ".eh_proj."
_PARTS = ("model.embed_tokens.", "model.norm.", _HEAD_PARTS)
# Dtypes by safetensors' names.
_DTYPES = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Rows compared at once.
_ROWS = 4096
# The most parts in a log line, and characters of each.
_SHOWN, _MAX_CHARS = 8, 100

_Config = TypeVar("_Config", bound=ModelConfig)


def weight_files(path: str | Path) -> list[Path]:
    """Sorted by name. As in transformers, a single file takes precedence over an index, which may be stale. Without
    either, the GGUF file. Raises `CheckpointError`.
    """
    directory = Path(path)
    if not (directory / SINGLE).is_file() and (index := directory / INDEX).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name or name == ".." for name in names):
            raise CheckpointError(f"{index}: weight_map names a file outside the checkpoint directory")
    else:
        names = [SINGLE if (directory / SINGLE).is_file() or not (directory / GGUF_FILE).is_file() else GGUF_FILE]
    for name in names:
        if not (directory / name).is_file():
            pickled = sorted(p.name for p in directory.glob("*.bin")) if name == SINGLE else []
            if pickled:
                raise CheckpointError(
                    f"{directory / pickled[0]}: pickle checkpoints are refused, convert it to {SINGLE}"
                )
            raise CheckpointError(f"{directory / name}: no such weight file")
    return [directory / name for name in names]


def open_weights(file: Path) -> Any:
    """An open file of weights with the interface of `safe_open`. Raises `CheckpointError` naming the file."""
    if file.suffix == ".gguf":
        from baton.models.loading.gguf_weights import GgufWeights

        return GgufWeights(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({error})") from None


def outline(file: Path, weights: Any, name: str) -> Tensor:
    """A tensor of the open `file` on the meta device. Raises `CheckpointError` for an unknown dtype."""
    stored = weights.get_slice(name)
    dtype = _DTYPES.get(kind := str(stored.get_dtype()))
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name} is {kind}, which is not supported")
    return torch.empty(stored.get_shape(), dtype=dtype, device="meta")


def stored_tensors(path: str | Path) -> dict[str, Path]:
    """The file of each tensor. Raises `CheckpointError` for a tensor in two files."""
    files: dict[str, Path] = {}
    for file in weight_files(path):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in files:
                    raise CheckpointError(f"{file}: tensor {name} is in {files[name].name} too")
                files[name] = file
    return files


class StoredTensors:
    """The tensors of all weight files. `names`: as stored; `name` gives the model's name of one."""

    def __init__(self, path: str | Path) -> None:
        """Raises `CheckpointError`."""
        self._path = Path(path)
        self._files = stored_tensors(path)
        self._rename = _renaming(self._files)
        self._names = {stored: self._rename(stored) for stored in self._files}

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def resolve_tying(self, config: _Config, dtype: torch.dtype) -> _Config:
        """As in transformers, a stored LM head that differs from the embedding in `dtype` is not tied. A tied matrix
        stored only as the head is loaded as the embedding.
        """
        if not config.tie_word_embeddings:
            return config
        stored = {name: stored for stored, name in self._names.items()}
        head, embedding = stored.get(HEAD), stored.get(EMBEDDING)
        # Parts of a quantised head are not the embedding's.
        parts = [name for name in stored if name.startswith(_HEAD_PARTS) and name != HEAD]
        if not parts:
            if head is None:
                return config
            if embedding is None:
                self._names[head] = EMBEDDING
                return config
            if self._are_equal(head, embedding, dtype):
                return config
        log.warning(
            "%s: tie_word_embeddings is true, but %s is stored and differs from the embedding: it is used",
            self._path,
            head or parts[0],
        )
        return replace(config, tie_word_embeddings=False)

    def _are_equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        with open_weights(self._files[one]) as file, open_weights(self._files[other]) as other_file:
            first, second = file.get_slice(one), other_file.get_slice(other)
            if first.get_shape() != second.get_shape():
                return False
            rows = range(0, first.get_shape()[0], _ROWS)
            return all(
                torch.equal(first[row : row + _ROWS].to(dtype), second[row : row + _ROWS].to(dtype)) for row in rows
            )

    def name(self, stored: str) -> str:
        """The model's name, also of a weight stored in parts."""
        return self._names.get(stored) or self._rename(stored)

    def check_layers(self, num_layers: int) -> None:
        """Raises `CheckpointError` unless the model's layers are stored, and after them MTP modules alone."""
        stored = {name: layer for name in self._names.values() if (layer := layer_index(name)) is not None}
        # A config without modules may have them stored too, such as GLM-OCR's.
        modules = {layer for name, layer in stored.items() if layer >= num_layers and _MTP in name}
        count = 1 + max({*stored.values()} - modules, default=-1)
        if count and count != num_layers:
            given = f"num_hidden_layers is {num_layers}"
            raise CheckpointError(f"{self._path}: config.json: {given}, but {count} layers are stored")

    def unused(self, num_layers: int, own_parts: tuple[str, ...] = ()) -> frozenset[str]:
        """Tensors of parts that the model lacks. Unknown tensors of other parts are not included: `fill_module` refuses
        them."""
        parts = _PARTS + own_parts
        return frozenset(stored for stored, name in self._names.items() if not _is_of(name, num_layers, parts))

    def log_unused(self, unused: Collection[str]) -> None:
        names = [self._names[stored] for stored in unused if not stored.endswith("rotary_emb.inv_freq")]
        if names:
            parts = Counter(map(_part, names))
            shown = ", ".join(f"{part} ({count})" for part, count in sorted(parts.items())[:_SHOWN])
            more = f" and {len(parts) - _SHOWN} more parts" if len(parts) > _SHOWN else ""
            log.warning("%s: %d tensors are not used by the model: %s%s", self._path, len(names), shown, more)
        used = {file.name for file in self._files.values()}
        files = sorted(file.name for file in self._path.glob("*.safetensors") if file.name not in used)
        if files:
            log.warning("%s: weight files that are not used: %s", self._path, ", ".join(files))


def _is_of(name: str, num_layers: int, parts: tuple[str, ...]) -> bool:
    index = layer_index(name)
    return name.startswith(parts) if index is None else index < num_layers


def _part(name: str) -> str:
    layer = LAYER.match(name)
    part = layer[0].rstrip(".") if layer else name.rpartition(".")[0] or name
    return "".join(c if c.isprintable() else "?" for c in part[:_MAX_CHARS])


def _renaming(names: Collection[str]) -> Callable[[str], str]:
    """As in transformers, the prefix `model.` is added if the decoder was saved alone, and removed if doubled."""
    if any(name.endswith(DEEPSEEK_V4) for name in names):
        return deepseek_name
    if any(name.startswith(_NESTED) for name in names):
        return _without_nesting
    if any(name.startswith("backbone.") for name in names):
        return _of_backbone
    if any(name.startswith("model.model.") for name in names):
        return lambda name: name.removeprefix("model.") if name.startswith("model.model.") else name
    if "embed_tokens.weight" in names:
        return lambda name: name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    return lambda name: name


def _without_nesting(name: str) -> str:
    for prefix in _NESTED:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _of_backbone(name: str) -> str:
    for prefix, usual in _BACKBONE.items():
        if name.startswith(prefix):
            name = usual + name.removeprefix(prefix)
    return name
