"""How the weights of a checkpoint are quantised, from its `config.json`. Without torch, like `config_json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from baton.errors import CheckpointError
from baton.models.config import RawConfig, get_bool, get_int

# Outputs and inputs that share a scale; None for all of them.
ScaleBlock = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Quantization:
    """`block` None: a scale for each tensor or output channel, as stored. `has_zeros`: zero points must be stored.
    `is_ordered`: groups are of consecutive inputs. `is_symmetric`: stored zero points are the middle of the range.
    `zero_offset`: what GPTQ's stored zero points lack."""

    method: str
    form: Literal["scaled", "packed", "gptq", "awq"]
    numbers: Literal["int", "float"] = "int"
    bits: int = 8
    block: ScaleBlock | None = None
    has_zeros: bool = False
    is_ordered: bool = True
    is_symmetric: bool = False
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
        raise _error(f"{method!r} of deepseek_v4 is not supported")
    read = _METHODS.get(str(method))
    if read is None or not isinstance(config, Mapping):
        known = ", ".join((*_METHODS, "mxfp4"))
        raise _error(f"quant_method is {method!r}, expected one of {known}")
    return read(config)


def _fp8(config: Mapping[str, Any]) -> Quantization:
    return Quantization("fp8", "scaled", "float", block=_block(config, "weight_block_size"))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _error(f"checkpoint_format is {form!r}, expected gptq or gptq_v2")
    return Quantization(
        "gptq",
        "gptq",
        bits=_bits(config, "bits", (2, 4, 8)),
        block=(1, _group_size(config)),
        is_ordered=not get_bool(config, "desc_act"),
        is_symmetric=get_bool(config, "sym"),
        zero_offset=int(form == "gptq"),
    )


def _awq(config: Mapping[str, Any]) -> Quantization:
    if (version := str(config.get("version") or "gemm").lower()) != "gemm":
        raise _error(f"version is {version!r}, expected gemm")
    return Quantization(
        "awq",
        "awq",
        bits=_bits(config, "bits", (4,)),
        block=(1, _group_size(config)),
        is_symmetric=not get_bool(config, "zero_point", True),
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    for name, field, unused in (("sparsity_config", "format", "dense"), ("transform_config", "config_groups", {})):
        section = config.get(name) or {}
        if not isinstance(section, Mapping) or section.get(field, unused) != unused:
            raise _error(f"{name} is not supported")
    groups = config.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, Mapping) else []
    sections = [entry.get("weights") for entry in entries if isinstance(entry, Mapping)]
    if len(sections) != 1 or not isinstance(sections[0], Mapping):
        raise _error("config_groups must have one group, with weights")
    weights, form = sections[0], str(entries[0].get("format") or config.get("format"))
    numbers, order, block = str(weights.get("type", "int")).lower(), weights.get("actorder"), _shared(weights)
    is_ordered = order in (None, False) or str(order).lower() in ("weight", "static")
    has_zeros = not get_bool(weights, "symmetric", True)
    scaled = Quantization("compressed-tensors", "scaled", block=block, has_zeros=has_zeros, is_ordered=is_ordered)
    if form == "pack-quantized":
        if numbers != "int" or block[0] != 1:
            raise _error(f"pack-quantized must have integers, with scales of channels or groups, has {dict(weights)}")
        return replace(scaled, form="packed", bits=_bits(weights, "num_bits", (4, 8)))
    if numbers not in _NUMBERS.get(form, ()):
        raise _error(f"format {form!r} with type {numbers!r} is not supported")
    if not is_ordered:
        raise _error(f"actorder {order!r} is not supported for {form}")
    _bits(weights, "num_bits", (8,))
    return replace(scaled, numbers="float" if numbers == "float" else "int")


_NUMBERS = {"float-quantized": ("float",), "int-quantized": ("int",), "naive-quantized": ("int", "float")}
_METHODS = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq}


def _shared(weights: Mapping[str, Any]) -> ScaleBlock:
    """By `strategy`, or as compressed-tensors derives it from `group_size`."""
    size = weights.get("group_size")
    given = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    strategy = str(given).lower()
    if strategy == "block" and (block := _block(weights, "block_structure")) is not None:
        return block
    known: dict[str, ScaleBlock] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "group":
        return 1, get_int(weights, "group_size")
    if strategy not in known:
        raise _error(f"strategy {given!r} is not supported")
    return known[strategy]


def _group_size(config: Mapping[str, Any]) -> int | None:
    """None: all inputs. Default as in transformers."""
    return None if config.get("group_size") == -1 else get_int(config, "group_size", 128)


def _block(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    block = config.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise _error(f"{name} is {block!r}, expected two sizes")
    return block[0], block[1]


def _bits(config: Mapping[str, Any], name: str, known: Collection[int]) -> int:
    bits = get_int(config, name)
    if bits not in known:
        raise _error(f"{name} is {bits}, expected {' or '.join(map(str, known))}")
    return bits


def _error(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {what}")
