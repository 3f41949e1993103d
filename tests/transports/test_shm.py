"""Specific to shared memory: files with names and modes, dying owners, strangers' descriptors."""

from __future__ import annotations

import base64
import contextlib
import itertools
import mmap
import os
import resource
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.errors import ConfigError, ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.testing.transport_peer import SpawnedPeer
from baton.transports.mapped import mover
from baton.transports.mapped.memory_transport import DIRECT_BYTES
from baton.transports.mapped.populate import PIECE_BYTES, populate, populate_beside
from baton.transports.mapped.segments import SHM_DIR, remove_stale_segments, shm_status
from baton.transports.mapped.shm import ShmTransport
from baton.transports.process import process_start_ticks
from testkit.inside import process_of
from testkit.processes.leftovers import files_left_open, open_files
from testkit.waiting import eventually


@pytest.fixture
def transport() -> Iterator[ShmTransport]:
    made = ShmTransport()
    yield made
    made.close()


def segments(pid: int) -> list[str]:
    return sorted(name for name in os.listdir(SHM_DIR) if name.startswith(f"baton-{pid}-"))


def test_segment_files_are_private_and_unlinked(transport: ShmTransport) -> None:
    transport.allocate("pool", 5000)
    (name,) = segments(os.getpid())
    status = os.stat(os.path.join(SHM_DIR, name))
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 5000
    transport.close()
    assert segments(os.getpid()) == []


def test_memory_outlives_close_for_its_readers(transport: ShmTransport) -> None:
    region = transport.allocate("pool", 4096)
    transport.close()
    region[:] = 7
    assert bool((region == 7).all())


def test_memory_needs_no_faults_when_it_is_used(transport: ShmTransport) -> None:
    memory = transport.allocate("kv", 2 * PIECE_BYTES)
    if not populate(memory[: mmap.PAGESIZE]):
        pytest.skip("this kernel enters no pages beforehand")
    with contextlib.closing(ShmTransport()) as other:
        peer = other.connect(transport.register([memory])).result()
        for end, bytes_ in ((transport, memory), (other, peer.regions[0])):
            for _ in range(200):  # a job requests the next one
                done = threading.Event()
                end._populating.post(done.set)
                assert done.wait(60)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            bytes_[:: mmap.PAGESIZE] = 1
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            assert faults < bytes_.size // mmap.PAGESIZE // 10


def test_memory_may_be_unmapped_while_its_tables_are_made() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 3 * PIECE_BYTES), dtype=np.uint8)
    jobs: list[Callable[[], object]] = []
    pauses: list[bool] = []
    mapped = weakref.ref(memory)
    populate_beside(memory, jobs.append, lambda seconds: pauses.append(mapped() is None), itertools.count().__next__)
    jobs.pop()()
    (job,) = jobs
    del memory
    assert mapped() is None
    job()
    assert len(jobs) == 1
    assert pauses == [False, True]


def test_tables_are_made_while_a_core_is_idle() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * PIECE_BYTES), dtype=np.uint8)
    if not populate(memory[: mmap.PAGESIZE]):
        pytest.skip("this kernel enters no pages beforehand")
    jobs: list[Callable[[], object]] = []
    idle = iter([0.0, 0.0, 0.0, 0.03])

    def faults_at(byte: int) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        memory[byte] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    populate_beside(memory, jobs.append, lambda seconds: None, lambda: next(idle, 1.0))
    jobs.pop()()
    assert faults_at(PIECE_BYTES // 2)
    jobs.pop()()
    assert not faults_at(PIECE_BYTES - 1)
    for _ in range(100):  # no core is idle any more
        if jobs:
            jobs.pop()()
    assert not faults_at(memory.size - 1)


def test_a_thread_makes_tables_until_close() -> None:
    transport = ShmTransport()
    memory = [transport.allocate(name, PIECE_BYTES) for name in ("a", "b")]
    assert [thread.name for thread in threading.enumerate()].count("baton-populate") == 1
    transport.close()
    assert "baton-populate" not in [thread.name for thread in threading.enumerate()]
    del memory


def test_too_much_memory_is_an_error(transport: ShmTransport) -> None:
    with pytest.raises(TransportError, match=r"'pool'.*(is full|too large|memory)"):
        transport.allocate("pool", 1 << 60)
    assert segments(os.getpid()) == []


def test_regions_must_be_own_memory(transport: ShmTransport) -> None:
    with pytest.raises(TransportError, match="must lie in memory from its allocate"):
        transport.register([np.zeros(16, dtype=np.uint8)])
    pool = transport.allocate("pool", 4096)
    for bad in (pool.view(np.uint16), pool[::2], pool[:0], pool.reshape(2, -1)):
        with pytest.raises(TransportError, match="flat, contiguous"):
            transport.register([bad])  # type: ignore[list-item]
    transport.register([pool[64:128], pool[:64]])


def test_regions_may_be_parts_of_one_segment(transport: ShmTransport) -> None:
    pool = transport.allocate("pool", 4096)
    peer = transport.connect(transport.register([pool[:100], pool[1000:1200]])).result(60)
    assert list(peer.region_sizes) == [100, 200]
    pool[:100] = 3
    at = np.array([5], dtype=np.int64)
    assert transport.submit(peer, "write", CopyList(0, 1, at, at * 2, at)).wait(60) == "done"
    assert pool[1010:1015].tolist() == [3] * 5
    assert int(pool[100:].sum()) == 15


_SCRIPT = """
import os, sys
from baton.transports.mapped.shm import ShmTransport
transport = ShmTransport()
transport.allocate("pool", 4096)
print("ready", flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        transport.close()
        os._exit(0)
    os.waitpid(child, 0)
    print(len([n for n in os.listdir("/dev/shm") if n.startswith(f"baton-{os.getpid()}-")]), flush=True)
"""


def start(mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_segments_of_a_killed_owner_are_removed_at_start_up() -> None:
    with start("wait") as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        left = segments(owner.pid)
        assert len(left) == 1
        # Segments left by other tests' engines may be removed here.
        assert not {*remove_stale_segments()} & {*left}
        assert segments(owner.pid) == left
        owner.kill()
        owner.wait()
    ShmTransport().close()
    assert segments(owner.pid) == []


def test_exit_unlinks_and_a_forked_child_does_not() -> None:
    with start("exit") as owner:
        owner.communicate(timeout=60)
    assert owner.returncode == 0
    assert segments(owner.pid) == []
    with start("fork") as owner:
        out, _ = owner.communicate(timeout=60)
    assert out == "ready\n1\n"
    assert segments(owner.pid) == []


def test_stale_removal_spares_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = "baton-4194399-123-0123456789abcdef"
    recycled = f"baton-{os.getpid()}-1-0123456789abcdef"
    alive = f"baton-{os.getpid()}-{process_start_ticks(os.getpid())}-0123456789abcdef"
    others = [
        "baton-1-2-xyz",
        "baton-4194399-123-0123456789abcdef.bak",
        "psm_1234",
        "xbaton-1-2-0123456789abcdef",
    ]
    target = tmp_path / "target"
    target.write_bytes(b"x")
    for name in (dead, recycled, alive, *others):
        (tmp_path / name).write_bytes(b"x")
    link = tmp_path / "baton-4194398-123-0123456789abcdef"
    link.symlink_to(target)
    assert remove_stale_segments(str(tmp_path)) == sorted([dead, recycled])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, *others, "target", link.name])


def forge(name: str, nbytes: int, regions: list[list[int]]) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "baton-shm-2", "host_key": "", "segments": [[name, nbytes]], "regions": regions},
    )


@pytest.mark.parametrize(
    "name",
    [
        "../etc/passwd",
        "baton-1-1-../../x",
        "",
        "baton-1-2-0123456789ABCDEF",
        "x\0y",
        "baton-1-2-0123456789abcdef\n",
        "psm_0123456",
        "baton-4294967296-2-0123456789abcdef",
    ],
)
def test_strange_names_are_refused(transport: ShmTransport, name: str) -> None:
    with pytest.raises(ProtocolError, match="not a name of a shared memory segment"):
        transport.connect(forge(name, 4096, [[0, 0, 16]])).result(60)


@pytest.mark.parametrize("region", [[1, 0, 16], [-1, 0, 16], [0, -1, 16], [0, 4090, 16], [0, 0, 0], [0, 2**62, 2**62]])
def test_regions_outside_their_segment_are_refused(transport: ShmTransport, region: list[int]) -> None:
    transport.allocate("pool", 4096)
    (name,) = segments(os.getpid())
    with pytest.raises(ProtocolError, match=r"outside its segment|not a descriptor"):
        transport.connect(forge(name, 4096, [region])).result(60)


def test_wrong_size_mode_or_kind_is_refused(transport: ShmTransport) -> None:
    transport.allocate("pool", 4096)
    (name,) = segments(os.getpid())
    path = os.path.join(SHM_DIR, name)
    with pytest.raises(TransportError, match="no private file of 8192 bytes"):
        transport.connect(forge(name, 8192, [[0, 0, 16]])).result(60)
    os.chmod(path, 0o644)
    with pytest.raises(TransportError, match="no private file"):
        transport.connect(forge(name, 4096, [[0, 0, 16]])).result(60)
    with pytest.raises(TransportError, match="cannot open shared memory"):
        transport.connect(forge("baton-1-2-0123456789abcdef", 4096, [[0, 0, 16]])).result(60)
    link = os.path.join(SHM_DIR, f"{name[:-4]}beef")
    os.symlink(path, link)
    try:
        with pytest.raises(TransportError, match="cannot open shared memory"):
            transport.connect(forge(os.path.basename(link), 4096, [[0, 0, 16]])).result(60)
    finally:
        os.unlink(link)


def test_one_descriptor_costs_few_files(transport: ShmTransport) -> None:
    transport.allocate("pool", 4096)
    (name,) = segments(os.getpid())
    before = open_files()
    twice = {"type": "baton-shm-2", "host_key": "", "segments": [[name, 4096]] * 2, "regions": []}
    with pytest.raises(ProtocolError, match="and differ"):
        transport.connect(msgspec.msgpack.encode(twice)).result(60)
    for count in (0, 65):
        many = {**twice, "segments": [[f"{name[:-4]}{i:04x}", 4096] for i in range(count)]}
        with pytest.raises(ProtocolError, match="not a descriptor"):
            transport.connect(msgspec.msgpack.encode(many)).result(60)
    with pytest.raises(ProtocolError, match="not a descriptor"):
        transport.connect(b"\x82\xa4type\xa1\xff").result(60)
    assert not files_left_open(before)


def test_a_process_that_may_open_no_more_files_says_so(transport: ShmTransport) -> None:
    transport.register([transport.allocate("pool", 4096)])
    (name,) = segments(os.getpid())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    spare = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
    try:
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        os.close(spare)  # enough for the segment's file, but not for its mapping
        with pytest.raises(TransportError, match=r"cannot (map|open) shared memory"):
            transport.connect(forge(name, 4096, [[0, 0, 16]])).result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)


_SURVIVOR = """
import base64, os, sys, time
from baton.transports.mapped.shm import ShmTransport
transport = ShmTransport()
transport.register([transport.allocate("pool", 4096)])
print("ready", flush=True)
peer = transport.connect(base64.b64decode(sys.stdin.readline())).result(60)
print("connected", flush=True)
while not peer.fenced():
    time.sleep(0.01)
transport.disconnect(peer)
print("disconnected", flush=True)
sys.stdin.readline()
"""


def test_segments_of_a_killed_owner_are_removed_by_its_peer() -> None:
    owner = SpawnedPeer("shm://", [4096, 100])
    pid = process_of(owner).pid
    with subprocess.Popen(
        [sys.executable, "-c", _SURVIVOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            assert peer.stdout.readline() == "ready\n"
            peer.stdin.write(base64.b64encode(owner.descriptor).decode() + "\n")
            peer.stdin.flush()
            assert peer.stdout.readline() == "connected\n"
            left = segments(pid)
            assert len(left) == 2
            owner.kill()
            assert peer.stdout.readline() == "disconnected\n"
            eventually(lambda: segments(pid) == [])
            # Nothing of the living survivor was touched.
            assert len(segments(peer.pid)) == 1
        finally:
            owner.kill()
            peer.communicate("\n", timeout=60)
    assert segments(peer.pid) == []


def test_connections_leave_no_open_files(transport: ShmTransport) -> None:
    pool = transport.allocate("pool", 4096)
    descriptor = transport.register([pool])
    before = open_files()
    for _ in range(20):
        transport.disconnect(transport.connect(descriptor).result(60))
        with pytest.raises(TransportError):
            transport.connect(descriptor.replace(b"\xcd\x10\x00", b"\xcd\x20\x00")).result(60)
    assert not files_left_open(before)


def test_a_disconnected_peer_holds_no_file_and_its_death_is_still_seen(transport: ShmTransport) -> None:
    transport.register([transport.allocate("pool", 4096)])
    owner = SpawnedPeer("shm://", [4096])
    try:
        before = open_files()
        peers = [transport.connect(owner.descriptor).result(60) for _ in range(3)]
        for peer in peers:
            transport.disconnect(peer)
        assert not files_left_open(before)
        assert not any(peer.alive() or peer.fenced() for peer in peers)
        last = transport.connect(owner.descriptor).result(60)
        # Killed, but not reaped yet: its memory is gone, which is what counts.
        process_of(owner).kill()
        while not last.fenced():
            time.sleep(0.01)
        transport.disconnect(last)
        assert last.fenced()
        eventually(lambda: segments(process_of(owner).pid) == [])
        owner.kill()
        assert all(peer.fenced() and not peer.alive() for peer in [*peers, last])
    finally:
        owner.kill()


def test_an_owner_that_died_before_it_was_connected_is_fenced(transport: ShmTransport) -> None:
    """Its pages wait for the fence: a peer may die between its HELLO and our connecting."""
    transport.register([transport.allocate("pool", 4096)])
    for _ in range(5):
        owner = SpawnedPeer("shm://", [4096])
        owner.kill()
        with contextlib.suppress(TransportError):  # another test's engine has started and swept the segments
            peer = transport.connect(owner.descriptor).result(60)
            break
    assert peer.fenced()
    assert not peer.alive()


def test_an_owner_of_another_pid_namespace_is_fenced_by_its_lock(transport: ShmTransport) -> None:
    transport.register([transport.allocate("pool", 4096)])
    owner = SpawnedPeer("shm://", [4096])
    try:
        parsed = msgspec.msgpack.decode(owner.descriptor)
        peer = transport.connect(msgspec.msgpack.encode({**parsed, "host_key": "elsewhere"})).result(60)
        assert not peer.fenced()
    finally:
        owner.kill()
    assert peer.fenced()


def test_a_closed_transport_is_fenced_though_its_process_lives(transport: ShmTransport) -> None:
    transport.register([transport.allocate("pool", 4096)])
    other = ShmTransport()
    try:
        peer = transport.connect(other.register([other.allocate("pool", 4096)])).result(60)
        (name,) = [name for name in segments(os.getpid()) if name != segments_of(transport)]
        os.unlink(os.path.join(SHM_DIR, name))
        assert not peer.fenced(), "somebody removed the file: its owner copies all the same"
    finally:
        other.close()
    assert peer.fenced()


def segments_of(transport: ShmTransport) -> str:
    return transport._segments[0].name


def test_a_cancel_waits_for_no_copy_of_another_peer(transport: ShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stuck(*arguments: object) -> int:
        begun.set()
        assert go_on.wait(60)
        return 0

    monkeypatch.setattr(mover, "copy_runs", stuck)
    pool = transport.allocate("pool", 2 * DIRECT_BYTES)
    descriptor = transport.register([pool])
    one, two = (transport.connect(descriptor).result(60) for _ in range(2))
    run = CopyList(0, 0, *[np.array([DIRECT_BYTES - 1], dtype=np.int64)] * 2, np.array([DIRECT_BYTES + 1]))
    try:
        moving, queued, behind = (transport.submit(peer, "write", run) for peer in (one, two, two))
        assert begun.wait(60)
        transport.cancel(queued)
        assert queued.poll() == "failed"
        transport.disconnect(two)
        assert behind.poll() == "failed"
        transport.disconnect(one)
        assert moving.poll() == "pending", "bytes of it may move"
    finally:
        go_on.set()
    assert moving.wait(60) == "failed"


def test_a_host_without_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_transport: shm needs .*/none: No such file or directory"):
        shm_status(str(tmp_path / "none"))
