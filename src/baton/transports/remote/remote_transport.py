"""The transport over a transfer library (`Library`), which the driver's thread owns."""

from __future__ import annotations

import ipaddress
import mmap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
import xxhash

from baton.errors import BatonError, ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.transports.base import (
    ByteArray,
    DeviceMemory,
    Direction,
    Operation,
    Peer,
    Region,
    TransportOptions,
    check_copies,
    check_regions,
    close_at_exit,
    finish_future,
    source_and_dest,
)
from baton.transports.batches import Job, make_job
from baton.transports.process import Contact, ProcessWatch, check_contact
from baton.transports.remote.driver import CALL_TIMEOUT_S, Driver
from baton.transports.remote.library import Library, RemotePeer

CLOSE_TIMEOUT_S = 2.0  # for batches in flight
MAX_DESCRIPTOR = 1 << 20
MAX_REGIONS = 1024


class RemoteDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`endpoint` and `metadata` are the library's. Regions are (address, bytes), on CUDA device number `device`, or on
    the host if that is None."""

    scheme: str
    endpoint: str
    metadata: bytes
    regions: list[tuple[int, int]]
    contact: Contact
    digest: int  # of the metadata: damage might crash a library's parser
    device: int | None = None


class HostOptions(TransportOptions, frozen=True, kw_only=True):
    """`host`: a numeric address of this machine that peers can reach."""

    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        check_host(self.host)


def check_host(host: str) -> None:
    """Raises `ValueError`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"host is a numeric address, got {host!r}") from None
    if address.is_unspecified:
        raise ValueError(f"host is an address that peers can reach, got {host!r}")


class RemoteTransport:
    """Regions may be anywhere in host memory, with some libraries on a device."""

    def __init__(self, library: Library, host: str) -> None:
        """`host`: the lifeline's address. Raises as `Library.start`."""
        self.scheme = library.scheme
        self._library = library
        self._lock = threading.Lock()
        self._regions: list[Region] = []
        self._spans: list[tuple[int, int]] = []
        self._closed = False
        self._driver = Driver(library, host)
        close_at_exit(self)

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        """Whole pages: a network card pins memory by the page."""
        if nbytes < 1:
            raise TransportError(f"cannot allocate {nbytes} bytes for {name!r}")
        try:
            return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        except (OSError, OverflowError) as error:
            raise TransportError(f"cannot allocate {nbytes} bytes for {name!r}: {error}") from error

    def register(self, regions: Sequence[Region]) -> bytes:
        device = _device(regions)
        if not 0 < len(regions) <= MAX_REGIONS:
            raise TransportError(f"a transport registers 1 to {MAX_REGIONS} regions, got {len(regions)}")
        with self._lock:
            self._need_open()
            if self._spans:
                raise TransportError("regions are registered once per transport")
            if device is None:
                memory = check_regions(regions)
                spans = [(region.ctypes.data, region.size) for region in memory]
                endpoint, metadata = self._driver.call(lambda: self._library.register(memory))
            else:
                parts = [region for region in regions if isinstance(region, DeviceMemory)]
                spans = [(part.address, part.nbytes) for part in parts]
                endpoint, metadata = self._driver.call(lambda: self._library.register_device(parts))
            self._regions, self._spans = list(regions), spans
        digest = xxhash.xxh3_64_intdigest(metadata)
        contact = self._driver.lifeline.contact
        return msgspec.msgpack.encode(RemoteDescriptor(self.scheme, endpoint, metadata, spans, contact, digest, device))

    def connect(self, descriptor: bytes) -> Future[Peer]:
        """The connection is warm: one byte of each of the peer's regions has been read."""
        future: Future[Peer] = Future()
        name = f"baton-{self.scheme}-connect"
        # A peer that does not answer must delay no other.
        threading.Thread(
            target=finish_future, args=(future, lambda: self._reach(descriptor)), name=name, daemon=True
        ).start()
        return future

    def _reach(self, descriptor: bytes) -> RemotePeer:
        parsed = parse_descriptor(self.scheme, descriptor)
        with self._lock:
            self._need_open()
            if not self._spans:
                raise TransportError("register own regions before connecting")
        contact, driver = parsed.contact, self._driver
        watch = ProcessWatch(contact.pid, contact.start_time, contact.host_key)
        line = driver.lifeline.dial(contact)
        peer = RemotePeer(parsed.endpoint, parsed.regions, line, watch, driver.prove, device=parsed.device)
        count = len(parsed.regions)
        rows = np.ones((count, 3), dtype=np.int64)
        rows[:, 0] = driver.bounce.ctypes.data
        rows[:, 1] = [address for address, _ in parsed.regions]
        # A batch must be in one region.
        warm = Job(Operation("warm"), "read", rows, list(range(count + 1)))
        try:
            driver.call(lambda: driver.add(peer, parsed.metadata))
            driver.post(lambda: driver.begin(peer, warm))
            if warm.operation.wait(CALL_TIMEOUT_S) != "done":
                why = warm.operation.error or peer.broken or "timeout"
                raise TransportError(f"peer {peer.endpoint} does not answer: {why}")
        except BatonError:
            self.disconnect(peer)
            raise
        return peer

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        with self._lock:
            self._need_open()
            if not isinstance(peer, RemotePeer) or not peer.connected or peer not in self._driver.peers:
                raise TransportError("not connected to this peer")
            if not peer.alive():
                raise TransportError(f"peer {peer.endpoint} is gone")
            sources, dests = source_and_dest(direction, self._spans, peer.regions)
            check_copies(copies, [n for _, n in sources], [n for _, n in dests])
            source = sources[copies.source_region][0] + copies.source_offset
            dest = dests[copies.dest_region][0] + copies.dest_offset
            columns = (source, dest) if direction == "write" else (dest, source)
            job = make_job(Operation(tag), direction, np.stack([*columns, copies.nbytes], axis=1))
            self._driver.post(lambda: self._driver.begin(peer, job))
        return job.operation

    def cancel(self, operation: Operation) -> None:
        """The operation ends with the batch in flight, if any."""
        operation.flags[0] = 1
        self._driver.post(self._driver.drop_cancelled)

    def disconnect(self, peer: Peer) -> None:
        if not isinstance(peer, RemotePeer):
            raise TransportError("not a peer of this transport")
        driver = self._driver
        with self._lock:
            peer.connected = False
        if driver.stopping:
            peer.line.close()
            return
        for job in list(peer.jobs):
            job.operation.flags[0] = 1
        driver.post(lambda: driver.remove(peer))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._driver.peers)
            for peer in peers:
                peer.connected = False
        operations = [job.operation for peer in peers for job in list(peer.jobs)]
        for operation in operations:
            operation.flags[0] = 1
        self._driver.post(self._driver.drop_cancelled)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for operation in operations:
            operation.wait(max(0.0, deadline - time.monotonic()))
        self._driver.stop()
        self._regions = []

    def _need_open(self) -> None:
        if self._closed:
            raise TransportError(f"the {self.scheme} transport is closed")


def _device(regions: Sequence[Region]) -> int | None:
    """None: the host. Raises `TransportError` for a mixture."""
    devices = {region.device if isinstance(region, DeviceMemory) else None for region in regions}
    if len(devices) > 1:
        raise TransportError("regions are all memory of the host, or all of one device")
    return devices.pop() if devices else None


def parse_descriptor(scheme: str, descriptor: bytes) -> RemoteDescriptor:
    """Raises `ProtocolError`."""
    if len(descriptor) > MAX_DESCRIPTOR:
        raise ProtocolError(f"the descriptor of the {scheme} transport is too long")
    try:
        parsed = msgspec.msgpack.decode(descriptor, type=RemoteDescriptor)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"not a descriptor of a {scheme} transport: {error}") from error
    if parsed.scheme != scheme:
        raise ProtocolError(f"a descriptor of {parsed.scheme!r} given to the {scheme} transport")
    check_contact(parsed.contact)
    if not 0 < len(parsed.regions) <= MAX_REGIONS:
        raise ProtocolError(f"the {scheme} descriptor names {len(parsed.regions)} regions")
    if xxhash.xxh3_64_intdigest(parsed.metadata) != parsed.digest:
        raise ProtocolError(f"the metadata in the {scheme} descriptor is damaged")
    for address, nbytes in parsed.regions:
        if address < 1 or nbytes < 1 or address > 2**63 - 1 - nbytes:
            raise ProtocolError(f"a region of the {scheme} descriptor is no memory")
    if parsed.device is not None and not 0 <= parsed.device < 1 << 16:
        raise ProtocolError(f"the device in the {scheme} descriptor is out of range")
    return parsed
