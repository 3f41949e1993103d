"""Attention backends by name, imported when first made."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from baton.engine.attention.base import AttentionBackend


def _paged_cpu() -> AttentionBackend:
    from baton.engine.attention.paged_cpu import PagedCpuBackend

    return PagedCpuBackend()


def _sdpa() -> AttentionBackend:
    from baton.engine.attention.sdpa import SdpaBackend

    return SdpaBackend()


def _triton() -> AttentionBackend:
    from baton.engine.attention.triton import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"paged_cpu": _paged_cpu, "triton": _triton, "sdpa": _sdpa}
_DEVICES = {"paged_cpu": "cpu", "triton": "cuda"}


def backend_name(name: str | None, device: torch.device | str) -> str:
    """None and `auto` pick `paged_cpu` on a CPU, `triton` on CUDA if it is installed, else `sdpa`. Raises
    `ConfigError`.
    """
    kind = str(device).partition(":")[0]
    if name is None or name == "auto":
        on_cuda = "triton" if importlib.util.find_spec("triton") else "sdpa"
        name = "paged_cpu" if kind == "cpu" else on_cuda
    if name not in BACKENDS:
        raise ConfigError("attention_backend", f"{name!r} is unknown, expected one of {', '.join(BACKENDS)}")
    if kind != _DEVICES.get(name, kind):
        raise ConfigError("attention_backend", f"{name} runs on {_DEVICES[name]} only, the device is {kind}")
    return name


def get_backend(name: str | None, device: torch.device | str) -> AttentionBackend:
    return BACKENDS[backend_name(name, device)]()
