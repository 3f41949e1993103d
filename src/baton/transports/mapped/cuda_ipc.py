"""`cuda_ipc://`: engines on GPUs of one host. Each maps the other's memory, and a kernel copies between the two.

Regions are inside allocations of `cudaMalloc` on one device, PyTorch's default. A handle opens the whole allocation.
Peers on two GPUs need peer access.

The caller of `submit` must have waited for the stream that wrote the source.

Fence: as in docs/transports.md.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from baton.errors import ProtocolError, TransportError
from baton.transports.base import ByteArray, DeviceMemory, Direction, TransportOptions
from baton.transports.batches import Runs
from baton.transports.mapped.cuda_driver import HANDLE_BYTES, CudaDriver, Launch, check_cuda
from baton.transports.remote.library import Library, RemotePeer
from baton.transports.remote.lifeline import Lifeline
from baton.transports.remote.remote_transport import RemoteTransport

_LOOPBACK = "127.0.0.1"
# PyTorch's variable for its allocator, and the name that it has from 2.9 on.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:true"
_Bytes = Annotated[int, Meta(ge=0, lt=1 << 60)]


class _Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address in its owner, and its allocation's handle and the offset in it."""

    address: Annotated[int, Meta(gt=0, lt=1 << 62)]
    nbytes: _Bytes
    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: _Bytes


@dataclass(slots=True)
class _Mapped:
    """A peer's regions, ascending: addresses in their owner, and the shift to local ones. `opened`: local addresses of
    its allocations."""

    start: Runs
    stop: Runs
    shift: Runs
    opened: list[int]

    def to_local(self, addresses: Runs, nbytes: Runs) -> Runs:
        """Local addresses. Raises `TransportError` outside the peer's regions."""
        at = np.searchsorted(self.start, addresses, side="right") - 1
        if bool((at < 0).any()) or bool((addresses + nbytes > self.stop[at]).any()):
            raise TransportError("a run lies in no region that the peer opened")
        moved: Runs = addresses + self.shift[at]
        return moved


# Addresses and bytes by endpoint: a process cannot open its own handles.
_here: dict[str, list[tuple[int, int]]] = {}
_numbers = itertools.count()


class CudaIpcLibrary(Library):
    scheme = "cuda_ipc"

    def __init__(self) -> None:
        self._lifeline: Lifeline
        self._bounce: ByteArray
        self._driver: CudaDriver | None = None
        self._endpoint = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(8)}"
        self._peers: dict[str, _Mapped] = {}

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        check_cuda()
        self._lifeline, self._bounce = lifeline, bounce

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.synchronize()
        for endpoint in list(self._peers):
            self.remove(endpoint)
        _here.pop(self._endpoint, None)

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        raise TransportError("the cuda_ipc transport opens a device's memory, not that of the host")

    def register_device(self, memory: list[DeviceMemory]) -> tuple[str, bytes]:
        check_allocator(os.environ)
        driver = self._driver = CudaDriver(memory[0].device, self._lifeline.wake)
        exported = [(part.address, part.nbytes, *driver.export(part.address)) for part in memory]
        _here[self._endpoint] = [(part.address, part.nbytes) for part in memory]
        return self._endpoint, msgspec.msgpack.encode(exported)

    def add(self, endpoint: str, metadata: bytes) -> None:
        assert self._driver is not None, "a transport registers before it connects"
        try:
            regions = msgspec.msgpack.decode(metadata, type=list[_Region])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not the metadata of a cuda_ipc transport: {error}") from error
        regions.sort(key=lambda region: region.address)
        opened: dict[bytes, tuple[int, int]] = {}
        shift = []
        try:
            for region in regions:
                if endpoint in _here:
                    if (region.address, region.nbytes) not in _here[endpoint]:
                        raise ProtocolError("the metadata in the descriptor is another transport's")
                    shift.append(0)
                    continue
                if region.handle not in opened:
                    opened[region.handle] = self._driver.open(region.handle)
                address, nbytes = opened[region.handle]
                if region.offset + region.nbytes > nbytes:
                    raise ProtocolError(f"a region of {region.nbytes} bytes reaches beyond its allocation of {nbytes}")
                shift.append(address + region.offset - region.address)
        except BaseException:
            self._unmap([address for address, _ in opened.values()])
            raise
        start = np.array([region.address for region in regions], dtype=np.int64)
        stop = start + np.array([region.nbytes for region in regions], dtype=np.int64)
        own = [address for address, _ in opened.values()]
        self._peers[endpoint] = _Mapped(start, stop, np.array(shift, dtype=np.int64), own)

    def remove(self, endpoint: str) -> bool:
        self._unmap(self._peers.pop(endpoint).opened)
        return True

    def _unmap(self, addresses: list[int]) -> None:
        assert self._driver is not None
        for address in addresses:
            self._driver.unmap(address)

    def issue(self, peer: RemotePeer, direction: Direction, rows: Runs) -> Launch | None:
        assert self._driver is not None
        local = rows.copy()
        local[:, 1] = self._peers[peer.endpoint].to_local(rows[:, 1], rows[:, 2])
        if rows[0, 0] == self._bounce.ctypes.data:
            self._driver.read(*local[0].tolist())
            return None
        source, dest = (0, 1) if direction == "write" else (1, 0)
        return self._driver.copy(local, source, dest)

    def check(self, handle: Launch | None) -> bool:
        assert self._driver is not None
        return handle is None or self._driver.done(handle)

    def receive_rest(self) -> None:
        """Nothing to receive: a peer's kernel writes directly into this side's memory."""


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raises `TransportError` if PyTorch would allocate memory that no other process can open."""
    for name in _ALLOCATOR:
        if _EXPANDABLE in environment.get(name, "").lower():
            raise TransportError(f"cuda_ipc cannot open expandable segments: take {_EXPANDABLE} out of {name}")


def create(options: TransportOptions) -> RemoteTransport:
    return RemoteTransport(CudaIpcLibrary(), _LOOPBACK)
