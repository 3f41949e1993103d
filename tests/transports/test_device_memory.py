"""GPU memory as regions: the calls of NIXL, with an agent that only records them."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.errors import ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.transports.base import DeviceMemory
from baton.transports.registry import create_transport
from baton.transports.remote import nixl
from baton.transports.remote.remote_transport import RemoteDescriptor, RemoteTransport, parse_descriptor
from testkit.inside import driver_of, library_of

_numbers = itertools.count()


class FakeAgent:
    """NIXL's agent, as far as it is used. Copies end at once and move nothing."""

    def __init__(self, name: str, config: object) -> None:
        self.name = f"{name}-{next(_numbers)}"
        self.started_with = {device for thread, device in entered if thread == threading.get_ident()}
        self.backends = {"UCX": object()}
        self.registered: list[tuple[list[tuple[int, int, int, str]], str]] = []
        self.copies: list[tuple[str, Any, Any, str]] = []
        self.removed: list[str] = []
        self.breaks = False
        self.rounds = 0

    def register_memory(self, rows: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered.append((rows, kind))

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)

    def get_new_notifs(self) -> None:
        self.rounds += 1

    def get_xfer_descs(self, table: np.ndarray, kind: str) -> tuple[list[list[int]], str]:
        return table.tolist(), kind

    def initialize_xfer(self, direction: str, own: Any, far: Any, peer: str) -> Any:
        self.copies.append((direction, own, far, peer))
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle: object) -> None:
        if self.breaks:
            raise RuntimeError("posted in part")

    def check_xfer_state(self, handle: object) -> str:
        return "ERR" if self.breaks else "DONE"


@pytest.fixture(autouse=True)
def _fake_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(nixl_agent_config=lambda **options: options, nixl_agent=FakeAgent)
    monkeypatch.setattr(nixl, "load_api", lambda: api)


def memory_of(device: int, address: int, nbytes: int) -> DeviceMemory:
    """Memory of a device whose context is current in the threads in `entered`."""
    return DeviceMemory(address, nbytes, device, lambda: entered.add((threading.get_ident(), device)))


entered: set[tuple[int, int]] = set()


def agent_of(transport: RemoteTransport) -> FakeAgent:
    agent: FakeAgent = library_of(transport)._agent  # type: ignore[attr-defined]
    return agent


def nixl_transport() -> RemoteTransport:
    transport = create_transport("nixl://")
    assert isinstance(transport, RemoteTransport)
    return transport


def test_descriptors_name_device_and_kind_of_memory() -> None:
    near, far, host = nixl_transport(), nixl_transport(), nixl_transport()
    try:
        descriptor = far.register([memory_of(0, 1 << 40, 4096), memory_of(0, 1 << 41, 8192)])
        near.register([memory_of(3, 1 << 42, 4096)])
        assert agent_of(near).started_with == {3}
        bounce = driver_of(near).bounce.ctypes.data
        assert agent_of(near).registered == [
            ([(bounce, 64, 0, "")], "DRAM"),
            ([(1 << 42, 4096, 3, "")], "VRAM"),
        ]
        peer = near.connect(descriptor).result(60)
        assert peer.region_sizes == [4096, 8192]
        # A byte of each region is read to the host.
        name = agent_of(far).name
        assert agent_of(near).copies == [
            ("READ", ([[bounce, 1, 0]], "DRAM"), ([[address, 1, 0]], "VRAM"), name) for address in (1 << 40, 1 << 41)
        ]
        column = [np.array([value], dtype=np.int64) for value in (100, 200, 300)]
        assert near.submit(peer, "write", CopyList(0, 1, *column)).wait(60) == "done"
        own_row, far_row = [(1 << 42) + 100, 300, 3], [(1 << 41) + 200, 300, 0]
        assert agent_of(near).copies[2:] == [("WRITE", ([own_row], "VRAM"), ([far_row], "VRAM"), name)]
        with pytest.raises(ProtocolError, match="lies outside"):
            near.submit(peer, "read", CopyList(0, 0, *[np.array([4000], dtype=np.int64)] * 3))

        memory = host.allocate("host", 64)
        host.register([memory])
        host.connect(descriptor).result(60)
        assert agent_of(host).copies[0][1][1] == "DRAM"
        assert agent_of(host).copies[0][2] == ([[1 << 40, 1, 0]], "VRAM")
    finally:
        for transport in (near, far, host):
            transport.close()


def test_a_write_that_is_posted_in_part_has_failed() -> None:
    """It is not treated as never begun: the peer drains what it was sent."""
    near, far = nixl_transport(), nixl_transport()
    try:
        near.register([memory_of(3, 1 << 42, 64)])
        peer = near.connect(far.register([memory_of(0, 1 << 40, 64)])).result(60)
        before = agent_of(far).rounds
        agent_of(near).breaks = True
        operation = near.submit(peer, "write", CopyList(0, 0, *[np.array([8], dtype=np.int64)] * 3))
        assert operation.wait(60) == "failed"
        assert operation.error == "nixl: a copy failed"
        assert agent_of(near).removed == [agent_of(far).name]
        assert agent_of(far).rounds >= before + 8192
        assert not peer.alive()
    finally:
        far.close()
        near.close()


def test_one_transport_opens_one_kind_of_memory() -> None:
    transport = nixl_transport()
    try:
        memory = transport.allocate("host", 64)
        for regions in (
            [memory, memory_of(0, 4096, 64)],
            [memory_of(0, 4096, 64), memory_of(1, 8192, 64)],
        ):
            with pytest.raises(TransportError, match="all of one device"):
                transport.register(regions)
    finally:
        transport.close()


@pytest.mark.parametrize("uri", ["local://", "shm://", "file://?path={}", "faulty+shm://?fault=shift-page"])
def test_others_open_the_hosts_memory_only(uri: str, tmp_path: os.PathLike[str]) -> None:
    transport = create_transport(uri.format(tmp_path))
    try:
        with pytest.raises(TransportError, match="opens the host's memory"):
            transport.register([memory_of(0, 4096, 64)])
    finally:
        transport.close()


def test_a_device_that_cannot_be_is_refused() -> None:
    transport = nixl_transport()
    try:
        descriptor = transport.register([memory_of(1, 4096, 64)])
        assert parse_descriptor("nixl", descriptor).device == 1
        parsed = msgspec.msgpack.decode(descriptor, type=RemoteDescriptor)
        for device in (-1, 1 << 16):
            changed = msgspec.msgpack.encode(msgspec.structs.replace(parsed, device=device))
            with pytest.raises(ProtocolError, match="device"):
                parse_descriptor("nixl", changed)
    finally:
        transport.close()
