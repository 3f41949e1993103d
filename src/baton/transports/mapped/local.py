"""`local://`: copies within one process, for tests. Fence: the peer's `close`."""

from __future__ import annotations

import secrets

import numpy as np

from baton.errors import ProtocolError, TransportError
from baton.transports.base import ByteArray, TransportOptions
from baton.transports.mapped.memory_transport import MemoryPeer, MemoryTransport

_open: dict[bytes, list[ByteArray]] = {}


class LocalTransport(MemoryTransport):
    """Any flat uint8 array can be a region."""

    scheme = "local"

    def __init__(self) -> None:
        super().__init__()
        self._descriptor: bytes | None = None

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        if nbytes < 1:
            raise TransportError(f"cannot allocate {nbytes} bytes for {name!r}")
        return np.zeros(nbytes, dtype=np.uint8)

    def _describe(self, regions: list[ByteArray]) -> bytes:
        self._descriptor = b"baton-local-" + secrets.token_hex(8).encode()
        _open[self._descriptor] = regions
        return self._descriptor

    def _map(self, descriptor: bytes) -> MemoryPeer:
        if not descriptor.startswith(b"baton-local-"):
            raise ProtocolError("not a descriptor of a local transport")
        regions = _open.get(descriptor)
        if regions is None:
            raise TransportError("no open local transport has this descriptor")
        # `close` ends all copies before it removes the entry: a missing entry means closed and fenced.
        return MemoryPeer(
            name=descriptor.decode("ascii", "replace"),
            regions=list(regions),
            is_alive=lambda: descriptor in _open,
            is_fenced=lambda: descriptor not in _open,
        )

    def _release(self) -> None:
        if self._descriptor is not None:
            _open.pop(self._descriptor, None)


def create(options: TransportOptions) -> LocalTransport:
    return LocalTransport()
