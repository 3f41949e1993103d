"""Early check for impossible sizes, from a checkpoint's `config.json` and this host's memory.

`kv_memory` and `pool_size` check exactly after the weights are loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.checkpoint_files import json_if_usable
from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.transports.mapped.segments import SHM_DIR, shm_status
from baton.transports.registry import parse_uri


def check_sizes(config: EngineConfig, num_engines: int = 1) -> None:
    """Raise `ConfigError` without a driver, if the context is longer than the checkpoint's with any rope scaling, or if
    the KV of `num_engines` engines exceeds this host's memory."""
    longest = _longest_context(Path(config.model) / "config.json")
    if config.max_model_len is not None and longest is not None and config.max_model_len > longest:
        raise ConfigError("max_model_len", f"must be at most the checkpoint's {longest}, got {config.max_model_len}")
    if config.device != "cpu":
        need_driver(config.device)
    if config.kv_cache_memory is None or config.device != "cpu":
        return
    wanted, where = config.kv_cache_memory * num_engines * config.num_ranks, "the memory of this host has"
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_engines > 1 and parse_uri(config.kv_transfer_config.kv_transport)[0].rpartition("+")[2] == "shm":
        status = shm_status()
        if (room := status.f_blocks * status.f_frsize) < has:
            has, where = room, f"{SHM_DIR} has"
    if wanted > has:
        many = f"of {num_engines} engines is" if num_engines > 1 else "is"
        raise ConfigError("kv_cache_memory", f"{many} {wanted} bytes in all, and {where} {has}")


def need_driver(device: str, library: str = "libcuda.so.1") -> None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise ConfigError("device", f"{device} needs NVIDIA's driver: {error}") from None


def _longest_context(path: Path) -> int | None:
    lengths = [int(length * factor) for length, factor in _contexts(json_if_usable(path))]
    return max(lengths, default=None)


def _contexts(settings: Any) -> Iterator[tuple[int, float]]:
    if not isinstance(settings, dict):
        return
    yield from _contexts(settings.get("text_config"))
    length = settings.get("max_position_embeddings")
    if isinstance(length, int):
        yield length, max([1.0, *_factors(settings.get("rope_scaling")), *_factors(settings.get("rope_parameters"))])


def _factors(scaling: Any) -> Iterator[float]:
    for name, value in scaling.items() if isinstance(scaling, dict) else ():
        if name == "factor" and isinstance(value, int | float):
            yield float(value)
        yield from _factors(value)
