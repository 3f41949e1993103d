"""`cuda_ipc`: over a device if there is one; otherwise over host memory that stands in for a device's."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from baton.errors import ConfigError, ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.testing import check_transport
from baton.testing.transport_peer import pattern
from baton.testing.transport_suite import check_names
from baton.transports.base import DeviceMemory, Direction
from baton.transports.mapped import cuda_ipc
from baton.transports.mapped.cuda_driver import HANDLE_BYTES, Exported
from baton.transports.registry import create_transport
from baton.transports.remote.remote_transport import RemoteDescriptor, RemoteTransport


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", check_names())
def test_conformance_over_device_memory(check: str) -> None:
    ran = check_transport(lambda: create_transport("cuda_ipc"), spawn_uri="cuda_ipc", only=[check], device="cuda:0")
    assert ran == [check]


class Allocation:
    """Bytes that can be mapped a second time, at another address, by their handle."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("device")
        os.ftruncate(self.fd, nbytes)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)

    def memory(self, start: int, nbytes: int) -> DeviceMemory:
        return DeviceMemory(self.bytes.ctypes.data + start, nbytes, 0, lambda: None)


allocations: list[Allocation] = []


class FakeDriver:
    """CUDA's part, with host memory. `mapped` counts open mappings."""

    mapped = 0

    def __init__(self, device: int, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._open: dict[int, np.ndarray] = {}

    def export(self, address: int) -> Exported:
        for number, allocation in enumerate(allocations):
            start = allocation.bytes.ctypes.data
            if start <= address < start + allocation.bytes.size:
                return Exported(bytes([number]) * HANDLE_BYTES, address - start)
        raise TransportError("CUDA: CUDA_ERROR_INVALID_VALUE")

    def open(self, handle: bytes) -> tuple[int, int]:
        if handle[0] >= len(allocations):
            raise TransportError("CUDA: CUDA_ERROR_INVALID_HANDLE")
        found = allocations[handle[0]]
        second = np.frombuffer(mmap.mmap(found.fd, found.bytes.size), dtype=np.uint8)
        self._open[second.ctypes.data] = second
        FakeDriver.mapped += 1
        return second.ctypes.data, second.size

    def unmap(self, address: int) -> None:
        del self._open[address]
        FakeDriver.mapped -= 1

    def copy(self, rows: np.ndarray, source: int, dest: int) -> object:
        for row in rows.tolist():
            ctypes.memmove(row[dest], row[source], row[2])
        self._on_end()
        return object()

    def done(self, launch: object) -> bool:
        return True

    def read(self, host: int, address: int, nbytes: int) -> None:
        ctypes.memmove(host, address, nbytes)

    def synchronize(self) -> None:
        pass


class Elsewhere(dict[str, list[tuple[int, int]]]):
    """Hides that both ends are in one process."""

    def __contains__(self, key: object) -> bool:
        return False


@pytest.fixture(autouse=True)
def _fake_cuda(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if "over_device" in request.node.name or "package" in request.node.name:
        yield
        return
    monkeypatch.setattr(cuda_ipc, "CudaDriver", FakeDriver)
    monkeypatch.setattr(cuda_ipc, "check_cuda", lambda: None)
    yield
    allocations.clear()


def two_ends() -> tuple[RemoteTransport, RemoteTransport, bytes]:
    """Both ends register two regions in one allocation each. Returns the ends and the second's descriptor."""
    ends = []
    for _ in range(2):
        allocations.append(Allocation(1 << 16))
        transport = create_transport("cuda_ipc")
        assert isinstance(transport, RemoteTransport)
        ends.append((transport, transport.register([allocations[-1].memory(at, 4096) for at in (32768, 512)])))
    return ends[0][0], ends[1][0], ends[1][1]


def copies(source: int, dest: int, nbytes: int, source_region: int = 0, dest_region: int = 0) -> CopyList:
    columns = [np.array([value], dtype=np.int64) for value in (source, dest, nbytes)]
    return CopyList(source_region, dest_region, *columns)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends are in two processes."""
    monkeypatch.setattr(cuda_ipc, "_here", Elsewhere())


@pytest.mark.parametrize("one_process", [True, False])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_copies_just_its_bytes(direction: Direction, one_process: bool, request: pytest.FixtureRequest) -> None:
    if not one_process:
        request.getfixturevalue("elsewhere")
    near, far, descriptor = two_ends()
    try:
        mine, theirs = (allocation.bytes for allocation in allocations)
        mine[:], theirs[:] = pattern(mine.size, 1), pattern(theirs.size, 2)
        peer = near.connect(descriptor).result(60)
        source, dest = (mine, theirs) if direction == "write" else (theirs, mine)
        expected, kept = dest.copy(), source.copy()
        expected[512 + 70 : 512 + 270] = source[32768 + 33 : 32768 + 233]
        assert near.submit(peer, direction, copies(33, 70, 200, 0, 1)).wait(60) == "done"
        assert np.array_equal(dest, expected)
        assert np.array_equal(source, kept)
        with pytest.raises(ProtocolError, match="lies outside"):
            near.submit(peer, direction, copies(4000, 0, 100))
        assert FakeDriver.mapped == (0 if one_process else 1)  # both regions are in one allocation
    finally:
        near.close()
        far.close()
    assert FakeDriver.mapped == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda region: [*region[:3], (1 << 16) - 4095], "reaches beyond its allocation"),
        (lambda region: [region[0], 1 << 40, *region[2:]], "reaches beyond its allocation"),
        (lambda region: [*region[:2], b"\x07" * HANDLE_BYTES, region[3]], "INVALID_HANDLE"),
        (lambda region: [*region[:2], b"short", region[3]], "not the metadata"),
        (lambda region: [*region[:3], -1], "not the metadata"),
        (lambda region: "text", "not the metadata"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_metadata_that_lies_is_refused(change: Callable[[list[object]], object], match: str) -> None:
    near, far, descriptor = two_ends()
    try:
        error = near.connect(_changed(descriptor, change)).exception(10)
        assert isinstance(error, ProtocolError | TransportError)
        assert match in str(error)
        assert FakeDriver.mapped == 0
    finally:
        near.close()
        far.close()


@pytest.mark.usefixtures("elsewhere")
def test_regions_that_were_not_opened_are_not_reached() -> None:
    """A descriptor's addresses may differ from those for which its metadata has handles."""
    near, far, descriptor = two_ends()
    try:
        parsed = msgspec.msgpack.decode(descriptor, type=RemoteDescriptor)
        for start in (parsed.regions[0][0] - 8192, parsed.regions[0][0] + 4):
            claimed = msgspec.structs.replace(parsed, regions=[(start, 4096)])
            error = near.connect(msgspec.msgpack.encode(claimed)).exception(10)
            if error is None:  # its first byte was read: the last one is outside
                peer = near.connect(msgspec.msgpack.encode(claimed)).result(60)
                assert near.submit(peer, "write", copies(0, 0, 4096)).wait(60) == "failed"
                assert not peer.alive()
            else:
                assert "lies in no region" in str(error)
    finally:
        near.close()
        far.close()


def test_opens_no_memory_of_the_host() -> None:
    transport = create_transport("cuda_ipc")
    try:
        with pytest.raises(TransportError, match="not that of the host"):
            transport.register([transport.allocate("host", 64)])
    finally:
        transport.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"baton-serve\[cuda\]"):
        create_transport("cuda_ipc")


def _changed(descriptor: bytes, change: Callable[[list[object]], object]) -> bytes:
    """The descriptor with its first region's metadata changed, and a matching digest."""
    import xxhash

    parsed = msgspec.msgpack.decode(descriptor, type=RemoteDescriptor)
    regions = msgspec.msgpack.decode(parsed.metadata)
    metadata = msgspec.msgpack.encode([change(regions[0]), *regions[1:]])
    digest = xxhash.xxh3_64_intdigest(metadata)
    return msgspec.msgpack.encode(msgspec.structs.replace(parsed, metadata=metadata, digest=digest))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_no_other_process_can_open_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    memory = DeviceMemory(1 << 20, 4096, 0, lambda: None)
    with pytest.raises(TransportError, match=f"expandable segments: take expandable_segments:true out of {name}"):
        cuda_ipc.CudaIpcLibrary().register_device([memory])
