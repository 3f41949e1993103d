"""Options of built-in transports, read before their modules are imported."""

from __future__ import annotations

import ipaddress
import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_bytes`: of all entries."""

    path: Annotated[str, Meta(min_length=1)] = os.path.join("~", ".cache", "baton", "kv")
    max_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is at least 1, got {self.max_bytes}")


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    backend: str = "UCX"

    def __post_init__(self) -> None:
        check_host(self.host)


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""

    def __post_init__(self) -> None:
        check_host(self.host)


class FileOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host(self.host)


def check_host(host: str) -> None:
    """Raises `ValueError`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"host is a numeric address, got {host!r}") from None
    if address.is_unspecified:
        raise ValueError(f"host is an address that peers can reach, got {host!r}")
