"""`shm://`: engines of one host, over POSIX shared memory.

Each allocation is a file in /dev/shm with mode 0600, named `baton-<pid>-<start time of the process>-<random>`. Names in
a descriptor are matched strictly, so it cannot name other files.

Fence: as in docs/transports.md. Peers that disconnect from a killed owner unlink its segments, as does the next
transport that starts on the host. A peer that shrinks its files crashes this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from baton.errors import ProtocolError, TransportError
from baton.transports.base import ByteArray, Peer, TransportOptions, close_at_exit
from baton.transports.mapped.memory_transport import MemoryPeer, MemoryTransport
from baton.transports.mapped.mover import Mover
from baton.transports.mapped.populate import populate_beside
from baton.transports.mapped.segments import SEGMENT_NAME, SHM_DIR, remove_stale_segments
from baton.transports.process import ProcessWatch, own_host_key, process_start_ticks

_PID_LIMIT = 1 << 31
_MAX_DESCRIPTOR = 1 << 16
# Each costs a mapping and, in Python, an open file.
_MAX_SEGMENTS = 64
_MAX_REGIONS = 1024

_Bytes = Annotated[int, Meta(ge=0, lt=1 << 60)]


class _SegmentName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=64)]
    nbytes: _Bytes


class _Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    segment: Annotated[int, Meta(ge=0, lt=_MAX_SEGMENTS)]
    offset: _Bytes
    nbytes: _Bytes


class _Descriptor(msgspec.Struct, frozen=True, tag="baton-shm-2", forbid_unknown_fields=True):
    host_key: Annotated[str, Meta(max_length=128)]  # equal for processes that share pids
    segments: Annotated[list[_SegmentName], Meta(min_length=1, max_length=_MAX_SEGMENTS)]
    regions: Annotated[list[_Region], Meta(max_length=_MAX_REGIONS)]


@dataclass(slots=True, eq=False)
class _Segment:
    """The open file's lock shows, across pid namespaces, that this transport is open."""

    name: str
    fd: int
    memory: ByteArray


def _sweep() -> None:
    with contextlib.suppress(OSError):
        remove_stale_segments()


def _map_file(fd: int, nbytes: int) -> ByteArray:
    return np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)


class ShmTransport(MemoryTransport):
    """Regions must be in memory from `allocate`."""

    scheme = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._segments: list[_Segment] = []
        self._owner = os.getpid()
        self._populating = Mover("baton-populate")
        remove_stale_segments()
        close_at_exit(self)

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        """The host commits the memory now: a shortage is an error here, not a SIGBUS at the first write."""
        if nbytes < 1:
            raise TransportError(f"cannot allocate {nbytes} bytes for {name!r}")
        with self._lock:
            self._need_open()
            file = f"baton-{self._owner}-{process_start_ticks(self._owner)}-{secrets.token_hex(8)}"
            path = os.path.join(SHM_DIR, file)
            try:
                fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TransportError(f"cannot make shared memory for {name!r} in {SHM_DIR}: {error.strerror}") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(fd, 0, nbytes)
                segment = _Segment(file, fd, _map_file(fd, nbytes))
            except (OSError, ValueError) as error:
                os.unlink(path)
                os.close(fd)
                short = isinstance(error, OSError) and error.errno == errno.ENOSPC
                why = f"{SHM_DIR} is full" if short else str(error)
                raise TransportError(f"cannot allocate {nbytes} bytes of shared memory for {name!r}: {why}") from error
            self._segments.append(segment)
        populate_beside(segment.memory, self._populating.post)
        return segment.memory

    def _describe(self, regions: list[ByteArray]) -> bytes:
        segments = []
        for region in regions:
            address = region.ctypes.data
            for index, segment in enumerate(self._segments):
                offset = address - segment.memory.ctypes.data
                if offset >= 0 and offset + region.size <= segment.memory.size:
                    segments.append(_Region(index, offset, region.size))
                    break
            else:
                raise TransportError("a region of the shm transport must lie in memory from its allocate()")
        names = [_SegmentName(segment.name, segment.memory.size) for segment in self._segments]
        return msgspec.msgpack.encode(_Descriptor(own_host_key(), names, segments))

    def _map(self, descriptor: bytes) -> MemoryPeer:
        if len(descriptor) > _MAX_DESCRIPTOR:
            raise ProtocolError("the descriptor of the shm transport is too long")
        try:
            parsed = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a descriptor of an shm transport: {error}") from error
        owners = {_owner_of(segment.name) for segment in parsed.segments}
        if len(owners) != 1 or len({segment.name for segment in parsed.segments}) != len(parsed.segments):
            raise ProtocolError("the segments of one shm descriptor must have one owner, and differ")
        for region in parsed.regions:
            inside = region.segment < len(parsed.segments) and region.nbytes >= 1
            if not inside or region.nbytes > parsed.segments[region.segment].nbytes - region.offset:
                raise ProtocolError("a region of the shm descriptor lies outside its segment")
        try:
            with contextlib.ExitStack() as undo:
                files = []
                for segment in parsed.segments:
                    fd = _open_segment(segment)
                    undo.callback(os.close, fd)
                    files.append(fd)
                memory = [_map_file(fd, s.nbytes) for fd, s in zip(files, parsed.segments, strict=True)]
                watch = _Watch(ProcessWatch(*owners.pop(), parsed.host_key), os.dup(files[0]))
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map shared memory {parsed.segments[0].name}: {error}") from error
        for one in memory:
            populate_beside(one, self._populating.post)
        return MemoryPeer(
            name=parsed.segments[0].name,
            regions=[memory[r.segment][r.offset : r.offset + r.nbytes] for r in parsed.regions],
            is_alive=watch.alive,
            is_fenced=watch.fenced,
            is_dead=watch.dead,
            on_disconnect=watch.close,
        )

    def disconnect(self, peer: Peer) -> None:
        """Also unlink a dead peer's segments."""
        super().disconnect(peer)
        if peer.fenced():
            self._mover.post(_sweep)

    def _release(self) -> None:
        self._populating.close()
        # A forked child must not remove the parent's memory.
        for segment in self._segments:
            if self._owner == os.getpid():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(SHM_DIR, segment.name))
            os.close(segment.fd)
        self._segments = []


class _Watch:
    def __init__(self, process: ProcessWatch, fd: int) -> None:
        self._process = process
        self._fenced = False
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def fenced(self) -> bool:
        self._fenced = self._fenced or self._process.dead() or self._unlocked()
        return self._fenced

    def _unlocked(self) -> bool:
        """The owner locks the segment before its name is known, until its copies have ended."""
        if not self._close.alive:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def alive(self) -> bool:
        return self._close.alive and os.fstat(self._fd).st_nlink > 0 and not self._process.dead()

    def dead(self) -> bool:
        return self._process.dead()

    def close(self) -> None:
        """Afterwards `fenced` sees the owner's death only once the process is reaped."""
        self.fenced()
        self._process.release()
        self._close()


def _owner_of(name: str) -> tuple[int, str]:
    match = SEGMENT_NAME.fullmatch(name)
    if match is None or int(match[1]) >= _PID_LIMIT:
        raise ProtocolError(f"not a name of a shared memory segment: {name!r}")
    return int(match[1]), match[2]


def _open_segment(segment: _SegmentName) -> int:
    try:
        fd = os.open(os.path.join(SHM_DIR, segment.name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"cannot open shared memory {segment.name}: {error.strerror}") from error
    status = os.fstat(fd)
    private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not private or status.st_size != segment.nbytes or segment.nbytes < 1:
        os.close(fd)
        raise TransportError(f"shared memory {segment.name} is no private file of {segment.nbytes} bytes")
    return fd


def create(options: TransportOptions) -> ShmTransport:
    return ShmTransport()
