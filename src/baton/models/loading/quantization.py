"""How the weights of a checkpoint are quantised, from its `config.json`. Without torch, like `config_json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.errors import CheckpointError
from baton.models.config import RawConfig, get_int


@dataclass(frozen=True, slots=True)
class Quantization:
    """`form`: how a weight is stored. `bits` of a number; `block`: outputs and inputs that share a scale, None for
    whole channels or tensors; `zero_offset`: what GPTQ's stored zero points lack."""

    method: str
    form: Literal["scaled", "packed", "gptq", "awq"]
    bits: int = 8
    block: tuple[int, int] | None = None
    zero_offset: int = 0


def quantization_of(raw: RawConfig) -> Quantization | None:
    """`quantization_config`. None if unquantised, and for MXFP4, which an architecture reads itself. Raises
    `CheckpointError`.
    """
    config = raw.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if config is None or method == "mxfp4":
        return None
    if raw.get("model_type") == "deepseek_v4":
        raise CheckpointError(f"config.json: quantization_config: {method!r} of deepseek_v4 is not supported")
    read = _METHODS.get(str(method))
    if read is None or not isinstance(config, Mapping):
        known = ", ".join((*_METHODS, "mxfp4"))
        raise CheckpointError(f"config.json: quantization_config: quant_method is {method!r}, expected one of {known}")
    return read(config)


def _fp8(config: Mapping[str, Any]) -> Quantization:
    return Quantization("fp8", "scaled", block=_block(config, "weight_block_size"))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"config.json: quantization_config: checkpoint_format is {form!r}, expected gptq or gptq_v2"
        )
    return Quantization("gptq", "gptq", _bits(config, "bits", (2, 4, 8)), zero_offset=int(form == "gptq"))


def _awq(config: Mapping[str, Any]) -> Quantization:
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        raise CheckpointError(f"config.json: quantization_config: version is {version!r}, expected gemm")
    return Quantization("awq", "awq", _bits(config, "bits", (4,)))


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [entry.get("weights") for entry in entries if isinstance(entry, Mapping)]
    if len(weights) != 1 or not isinstance(weights[0], Mapping):
        raise CheckpointError("config.json: quantization_config: config_groups must have one group, with weights")
    form = str(entries[0].get("format") or config.get("format"))
    if form == "pack-quantized":
        return Quantization("compressed-tensors", "packed", _bits(weights[0], "num_bits", (4, 8)))
    if form not in ("float-quantized", "int-quantized", "naive-quantized"):
        raise CheckpointError(f"config.json: quantization_config: format {form!r} is not supported")
    _bits(weights[0], "num_bits", (8,))
    return Quantization("compressed-tensors", "scaled", block=_block(weights[0], "block_structure"))


_METHODS = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq}


def _block(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    block = config.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointError(f"config.json: quantization_config: {name} is {block!r}, expected two sizes")
    return block[0], block[1]


def _bits(config: Mapping[str, Any], name: str, known: Collection[int]) -> int:
    bits = get_int(config, name)
    if bits not in known:
        wanted = " or ".join(map(str, known))
        raise CheckpointError(f"config.json: quantization_config: {name} is {bits}, expected {wanted}")
    return bits
