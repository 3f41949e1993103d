"""The dtype that a model is computed in."""

from __future__ import annotations

import logging

import torch

from baton.errors import CheckpointError, ConfigError
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS
from baton.models.config import RawConfig

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's


def get_dtype(raw: RawConfig) -> torch.dtype:
    """The dtype the weights were saved for: `dtype`, else `torch_dtype`, else float32. Raises `CheckpointError`."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"config.json: dtype is {name!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def check_quantization(quantization: str, dtype: torch.dtype, has_products: bool = HAS_INT8_PRODUCTS) -> None:
    """Raise `ConfigError` if a model in `dtype` cannot be quantised."""
    if dtype is not torch.bfloat16:
        raise ConfigError("dtype", f"must be bfloat16 with quantization {quantization}, is {dtype_name(dtype)}")
    if not has_products:
        raise ConfigError("quantization", f"{quantization} needs a CPU with AVX2")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve_dtype(dtype: torch.dtype | str, raw: RawConfig) -> torch.dtype:
    """`dtype` itself or by name; for "auto" the dtype in config.json. float16 becomes float32, which holds all its
    numbers, since no kernel here computes in float16.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    resolved = get_dtype(raw if dtype == "auto" else {"dtype": _ALIASES.get(dtype, dtype)})
    if resolved is not torch.float16:
        return resolved
    logger.info("float16 is computed in float32, which takes twice its memory; bfloat16 takes as much as it")
    return torch.float32
