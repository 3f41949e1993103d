"""Recognises checkpoints that cannot be served, by file names, `config.json` and headers, before loading.

Each refusal names an alternative. Other unusable checkpoints are refused when loaded.
"""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.checkpoint_files import json_if_usable
from baton.errors import CheckpointError
from baton.models.config import ROPE_TYPES
from baton.models.loading.config_json import text_config
from baton.models.loading.gguf_names import GGUF_FILE
from baton.models.loading.quantization import quantization_of

# Suffixes of architectures that generate no text.
_OTHER_TASKS = {
    "ForSequenceClassification": "a classifier or a reranker",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a reader of answers",
    "ForRewardModel": "a reward model",
    "ForProcessRewardModel": "a reward model",
    "RewardModel": "a reward model",
    "ForMaskedLM": "an encoder",
    "ForConditionalGeneration": "a model of other inputs than text, or an encoder with a decoder",
}
_QUANTIZED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_GENERATE = "Baton serves models that generate text"
_FULL = "serve the checkpoint in full precision"
_SHOWN = 4
_MAX_HEADER_BYTES = 100 << 20
_LFS = b"version https://git-lfs"


def check_servable(path: str | Path) -> None:
    """Raise `CheckpointError` if `path` cannot be served."""
    directory = Path(path)
    why = _problem(directory, json_if_usable(directory / "config.json"))
    if why is not None:
        raise CheckpointError(f"{directory}: {why}")


def _problem(directory: Path, config: Mapping[str, Any]) -> str | None:
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    if "adapter_config.json" in names:
        base = json_if_usable(directory / "adapter_config.json").get("base_model_name_or_path")
        where = "lies beside the model and would not be applied" if config else f"needs its base model {base!r}"
        merge = "merge it (merge_and_unload of peft) and serve the result"
        return f"adapter_config.json is of an adapter, which {where}: {merge}"
    weights = fnmatch.filter(names, "*.safetensors")
    if not weights and GGUF_FILE not in names:
        files = fnmatch.filter(names, "*.gguf")
        if files:
            return f"{', '.join(files[:_SHOWN])}: {len(files)} GGUF files: name one of them as the model"
        pickled = next((name for name in names if name.endswith(".pth")), None)
        if pickled is not None:
            return f"{pickled} is in pickles, which are not opened: serve the model's checkpoint in safetensors"
    if weights and not config and "params.json" in names:
        return f"{weights[0]} is in Mistral's own format, without a config.json: serve the one in Hugging Face's format"
    is_plain = not text_config(config).get("quantization_config")
    return _of_config(config, names) or _of_rope(text_config(config)) or _of_headers(directory, weights, is_plain)


def _of_config(config: Mapping[str, Any], names: list[str]) -> str | None:
    if "modules.json" in names:
        return f"modules.json is of a sentence-transformers model, which makes embeddings: {_GENERATE}"
    # Models with images are served as their text model.
    architectures = config.get("architectures") if text_config(config) is config else None
    for name in architectures if isinstance(architectures, list) else ():
        for ending, what in _OTHER_TASKS.items():
            if isinstance(name, str) and name.endswith(ending):
                return f"config.json: architectures is {name!r}, {what}: {_GENERATE}"
    if config.get("dual_chunk_attention_config"):
        instead = "remove it to serve contexts of the original length, on which it has no influence"
        return f"config.json: dual_chunk_attention_config is not supported: {instead}"
    for field in ("compression_config", "quantization"):
        if config.get(field):
            return f"config.json: {field} is of quantized weights, which are not supported: {_FULL}"
    try:
        quantization_of(text_config(config))
    except CheckpointError as error:
        return f"{error}: {_FULL}"
    if not config.get("quantization_config"):
        file = next((name for name in _QUANTIZED if name in names), None)
        if file is not None:
            return f"{file} is of quantized weights, which are not supported: {_FULL}"
    if config.get("transformers_weights"):
        return "config.json: transformers_weights is not supported: serve weights in model.safetensors or an index"
    return None


def _of_rope(config: Mapping[str, Any]) -> str | None:
    for field in ("rope_parameters", "rope_scaling"):
        section = config.get(field)
        # Some models have one for each type of layer.
        parts = [section, *section.values()] if isinstance(section, Mapping) else []
        for kind in (part.get("rope_type", part.get("type")) for part in parts if isinstance(part, Mapping)):
            if kind is not None and kind not in ROPE_TYPES:
                instead = "; contexts of the original length need none of it" if kind == "dynamic" else ""
                return f"config.json: {field}: {kind!r} is not supported, only {', '.join(ROPE_TYPES)}{instead}"
    return None


def _of_headers(directory: Path, weights: list[str], is_plain: bool) -> str | None:
    single = "model.safetensors"
    index = json_if_usable(directory / "model.safetensors.index.json").get("weight_map")
    used = {single} if single in weights else set(index.values()) if isinstance(index, Mapping) else set()
    for name in sorted(name for name in used if isinstance(name, str)):
        if name not in weights:
            if not weights or "/" in name:
                continue
            return f"{name}: no such file, but model.safetensors.index.json has tensors in it: download it"
        if _is_pointer(directory / name):
            return f"{name} is a pointer of Git LFS, not the file itself: run git lfs pull"
        header, missing = _header(directory / name)
        if missing:
            return f"{name}: truncated, its last {missing} bytes are missing: download it again"
        for tensor, entry in header.items() if is_plain else ():
            if isinstance(entry, Mapping) and str(entry.get("dtype")).startswith("F8_"):
                return f"{name}: tensor {tensor} is {entry['dtype']}, quantized weights are not supported: {_FULL}"
    return None


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    """A safetensors header, and how many bytes the file lacks. Empty for other files: loading raises a better error."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            value = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else {}
        header = value if isinstance(value, dict) else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return header, max(0, 8 + size + max(ends) - path.stat().st_size) if ends else 0
    except (OSError, ValueError, TypeError, LookupError, RecursionError, struct.error):
        return {}, 0
