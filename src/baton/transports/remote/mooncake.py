"""`mooncake://`: engines of a cluster, over Mooncake's Transfer Engine. See docs/transports.md.

Mooncake's call for a batch blocks, and returns -1 for a refusal, a broken connection and a time-out alike, while parts
may still move. So a failed batch cuts the peer off.

Fence: as of `nixl`. To receive what a dead process left in sockets, this side copies one byte to itself until
Mooncake's single loop for all sockets must have read everything.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from baton.errors import ConfigError, ProtocolError, TransportError
from baton.kvstore.threads import started_executor
from baton.transports.base import ByteArray, Direction
from baton.transports.batches import Runs
from baton.transports.remote.library import Library, RemotePeer
from baton.transports.remote.lifeline import Lifeline
from baton.transports.remote.remote_transport import HostOptions, RemoteTransport
from baton.transports.remote.tcp_buffers import held_bytes

_ROUND_BYTES = 64 << 10  # the loop reads at most this much of a socket per round
_MAX_PEERS = 64  # batches at a time, one per peer


class MooncakeOptions(HostOptions, frozen=True, kw_only=True):
    """`device`: the network card's name for `rdma`; empty: any."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""


class MooncakeLibrary(Library):
    scheme = "mooncake"

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._engine: Any = None
        self._endpoint = ""
        self._wake: Callable[[], None]
        self._bounce: ByteArray
        # Also after `stop`: Mooncake may still process a batch.
        self._registered: list[ByteArray] = []
        self._workers = started_executor(_MAX_PEERS, "baton-mooncake-copy")

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        self._wake, self._bounce = lifeline.wake, bounce
        self._engine = load_engine()()
        options = self._options
        if self._engine.initialize(options.host, "P2PHANDSHAKE", options.protocol, options.device) != 0:
            raise ConfigError("transport", f"mooncake does not start with protocol {options.protocol!r}; see its log")
        self._endpoint = f"{options.host}:{self._engine.get_rpc_port()}"
        self._open(bounce)

    def _open(self, region: ByteArray) -> None:
        if self._engine.register_memory(region.ctypes.data, region.size) != 0:
            raise TransportError(f"mooncake cannot register {region.size} bytes of memory; see its log")
        self._registered.append(region)

    def stop(self) -> None:
        # Without registered memory Mooncake refuses peers, even with its port open.
        for region in self._registered:
            self._engine.unregister_memory(region.ctypes.data)
        self._workers.shutdown(wait=False)
        self._engine = None

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        for region in regions:
            self._open(region)
        return self._endpoint, b""

    def add(self, endpoint: str, metadata: bytes) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            ipaddress.ip_address(host)
            known = 0 < int(port) < 1 << 16
        except ValueError:
            known = False
        if not known:
            raise ProtocolError(f"not an endpoint of mooncake: {endpoint[:64]!r}")

    def remove(self, endpoint: str) -> bool:
        return False

    def issue(self, peer: RemotePeer, direction: Direction, rows: Runs) -> Any:
        copy = getattr(self._engine, f"batch_transfer_sync_{direction}")
        near, far, nbytes = (rows[:, i].tolist() for i in range(3))
        batch: Future[int] = self._workers.submit(copy, peer.endpoint, near, far, nbytes)
        batch.add_done_callback(lambda _: self._wake())
        return batch

    def check(self, handle: Future[int]) -> bool:
        if handle.done() and handle.result() != 0:
            raise TransportError("a copy was refused, or failed, or took too long; see Mooncake's log")
        return handle.done()

    def ended(self, handle: Future[int]) -> bool:
        return handle.done()

    def receive_rest(self) -> None:
        address = self._bounce.ctypes.data
        for _ in range(-(-held_bytes() // _ROUND_BYTES)):
            if self._engine.batch_transfer_sync_write(self._endpoint, [address], [address + 32], [1]) != 0:
                raise TransportError("mooncake cannot copy to itself")


def load_engine() -> Any:
    """Raises `ConfigError`."""
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        package = "mooncake-transfer-engine-non-cuda"
        raise ConfigError(
            "transport", f"mooncake:// needs the package {package}: pip install 'baton-serve[mooncake]'"
        ) from error
    except ImportError as error:
        library = str(error).split(":")[0]
        raise ConfigError("transport", f"mooncake does not load: {error}; {_hint(library)}") from error


def _hint(library: str) -> str:
    packages = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
    package = packages.get(library)
    return f"apt-get install {package}" if package else "install the package that holds this library"


def create(options: MooncakeOptions) -> RemoteTransport:
    return RemoteTransport(MooncakeLibrary(options), options.host)
