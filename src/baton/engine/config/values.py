"""Values of settings written as text: sizes in bytes, page sizes, JSON objects."""

from __future__ import annotations

import re

from baton.errors import ConfigError

MAX_BLOCK_SIZE = 1024
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def block_sizes(value: int | str, field: str = "block_size") -> dict[str, int]:
    """Tokens per KV page from `16` or `16,draft=8,sliding_window=32`: by name, owner or kind of groups; the empty name
    is for all others. Raises `ConfigError` naming `field`.
    """
    sizes: dict[str, int] = {}
    for part in str(value).split(","):
        name, _, size = map(str.strip, part.rpartition("="))
        if not size.isdecimal() or not 1 <= int(size) <= MAX_BLOCK_SIZE:
            raise ConfigError(field, f"must be 1 to {MAX_BLOCK_SIZE}, got {value}")
        if name in sizes:
            raise ConfigError(field, f"has two sizes for {name or 'all other groups'}: {value}")
        sizes[name] = int(size)
    return {"": 16, **sizes}


def parse_size(text: str, field: str = "kv_cache_memory") -> int:
    """Bytes from `2G`, `512M`, `1.5G` (powers of 1024), `2g` (powers of 1000) or a plain number, as in vLLM.

    Raises `ConfigError` naming `field`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)(?:i?B)?", text.strip())
    if match is None:
        raise ConfigError(field, f"must be bytes, or a size such as 512M or 2G, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
