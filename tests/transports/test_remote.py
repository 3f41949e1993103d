"""Stuck, dead and strange peers of library transports, and the messages if a part is missing."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.testing.transport_peer import SpawnedPeer, pattern
from baton.transports.base import Direction
from baton.transports.batches import batch_bounds, split_runs
from baton.transports.process import ProcessWatch, process_start_ticks
from baton.transports.registry import create_transport
from baton.transports.remote import driver
from baton.transports.remote import remote_transport as remote_module
from baton.transports.remote.file import Batch, FileLibrary
from baton.transports.remote.library import RemotePeer
from baton.transports.remote.lifeline import MAX_FRAME, Lifeline, Line
from baton.transports.remote.remote_transport import RemoteDescriptor, RemoteTransport, parse_descriptor
from testkit.handoffs.remote_uris import SCHEMES, uri_of
from testkit.inside import driver_of, library_of, process_of
from testkit.processes.leftovers import files_left_open, open_files
from testkit.waiting import eventually


def run_of(nbytes: int, source: int = 0, dest: int = 0) -> CopyList:
    return CopyList(0, 0, *(np.array([value], dtype=np.int64) for value in (source, dest, nbytes)))


# ---------------------------------------------------------------- stopped peers


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stopped_peer_proves_nothing_until_it_is_dead(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sockets a stopped process leaves the copy unfinished: neither quiet nor fenced, for any time."""
    monkeypatch.setattr(remote_module, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setenv("UCX_TLS", "tcp")
    uri = uri_of(scheme, tmp_path)
    size = 32 << 20
    near = create_transport(uri)
    far = SpawnedPeer(uri, [size])
    try:
        region = near.allocate("near", size)
        near.register([region])
        peer = near.connect(far.descriptor).result(60)
        os.kill(process_of(far).pid, signal.SIGSTOP)
        operation = near.submit(peer, "write", run_of(size), "stuck")
        assert operation.wait(0.5) == "pending"
        near.cancel(operation)
        assert operation.wait(0.2) == "pending"
        assert peer.alive()
        assert not peer.fenced()
        far.kill()
        eventually(peer.fenced)
        assert not peer.alive()
        assert operation.wait(60) == "failed"
        assert operation.error
    finally:
        far.kill()
        near.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cancel_issues_no_further_batch(scheme: str, tmp_path: Path) -> None:
    uri = uri_of(scheme, tmp_path)
    near, far = create_transport(uri), create_transport(uri)
    try:
        size = 64 << 20
        own, theirs = near.allocate("near", size), far.allocate("far", size)
        own[:] = 1
        near.register([own])
        peer = near.connect(far.register([theirs])).result(60)
        for _ in range(10):
            operation = near.submit(peer, "write", run_of(size), "long")
            near.cancel(operation)
            assert operation.wait(60) != "pending"
            if operation.error is not None:
                break  # otherwise everything was copied before this thread continued, as may happen on busy cores
        theirs[:] = 0
        assert operation.error is not None
        assert operation.error.startswith("cancelled after ")
        later = near.submit(peer, "write", run_of(16, 0, 32), "later")
        assert later.wait(60) == "done"
        assert int(theirs.sum()) == 16
    finally:
        far.close()
        near.close()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_moves_after_the_end_of_an_operation_that_was_disconnected(
    scheme: str, direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sockets, with a batch in progress that no library can stop."""
    monkeypatch.setattr(remote_module, "CLOSE_TIMEOUT_S", 0.0)
    monkeypatch.setenv("UCX_TLS", "tcp")
    uri, size = uri_of(scheme, tmp_path), 16 << 20
    near, far = create_transport(uri), create_transport(uri)
    try:
        sides = near.allocate("near", size), far.allocate("far", size)
        near.register([sides[0]])
        descriptor = far.register([sides[1]])
        source, dest = sides if direction == "write" else sides[::-1]
        source[:] = 1
        peer = near.connect(descriptor).result(60)
        for _ in range(3):
            operation = near.submit(peer, direction, run_of(size), "under way")
            time.sleep(0.001)
            near.disconnect(peer)
            assert operation.wait(60) != "pending"
            dest[:] = 0
            peer = near.connect(descriptor).result(60)  # a byte of each region has come since
            assert not dest.any()
        assert near.submit(peer, direction, run_of(size), "again").wait(60) == "done"
        assert bool(dest.all())
    finally:
        far.close()
        near.close()


@pytest.mark.parametrize("tls", ["tcp", "all"])
@pytest.mark.parametrize("scheme", ["nixl", "file"])
def test_copies_end_with_a_peer_of_another_host(
    scheme: str, tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or in another container of this host. The source's pages are freed; those that the peer could write are not."""
    monkeypatch.setenv("UCX_TLS", tls)
    uri, size = uri_of(scheme, tmp_path), 32 << 20
    near, far = create_transport(uri), SpawnedPeer(uri, [size])
    try:
        near.register([near.allocate("near", size)])
        contact = msgspec.msgpack.decode(far.descriptor, type=RemoteDescriptor).contact
        elsewhere = msgspec.structs.replace(contact, host_key="another host")
        peer = near.connect(altered(far.descriptor, contact=elsewhere)).result(60)
        operations = [near.submit(peer, "write", run_of(size), f"{i}") for i in range(4)]
        far.kill()
        assert all(operation.wait(60) != "pending" for operation in operations)
        assert not peer.alive()
        assert not peer.fenced()
    finally:
        far.kill()
        near.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_idle_transports_sleep(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a copy, both ends sleep until something happens, and do not poll."""
    waits: dict[Lifeline, list[float]] = {}
    wait = Lifeline.wait

    def waited(lifeline: Lifeline, timeout_s: float) -> list[Any]:
        waits.setdefault(lifeline, []).append(timeout_s)
        return wait(lifeline, timeout_s)

    monkeypatch.setattr(Lifeline, "wait", waited)
    uri = uri_of(scheme, tmp_path)
    near, far = create_transport(uri), create_transport(uri)
    try:
        near.register([near.allocate("near", 4096)])
        peer = near.connect(far.register([far.allocate("far", 4096)])).result(60)
        assert near.submit(peer, "write", run_of(4096)).wait(60) == "done"
        assert len(waits) == 2
        eventually(lambda: all(timeouts[-1] == driver.IDLE_S for timeouts in waits.values()))
    finally:
        far.close()
        near.close()


def test_peer_objects_share_an_endpoint(tmp_path: Path) -> None:
    """An engine that both prefills for and decodes from another one holds two peer objects of it."""
    near, far = create_transport(f"file://?path={tmp_path}"), create_transport(f"file://?path={tmp_path}")
    try:
        near.register([near.allocate("near", 64)])
        descriptor = far.register([far.allocate("far", 64)])
        one, two = near.connect(descriptor).result(60), near.connect(descriptor).result(60)
        near.disconnect(one)
        assert (one.alive(), two.alive()) == (False, True)
        assert near.submit(two, "write", run_of(64)).wait(60) == "done"
    finally:
        far.close()
        near.close()


def test_peers_that_never_answer_hold_no_thread_and_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lines live, but nothing comes back over them: connecting fails, and other peers are served all the same."""
    uri = f"file://?path={tmp_path}"
    near, mute, good = create_transport(uri), create_transport(uri), create_transport(uri)
    assert isinstance(near, RemoteTransport)
    assert isinstance(mute, RemoteTransport)
    try:
        near.register([near.allocate("near", 64)])
        far = mute.register([mute.allocate("mute", 64)])
        peer = near.connect(good.register([good.allocate("good", 64)])).result(60)
        monkeypatch.setattr(library_of(mute), "_answer_peer", lambda line, ask: None)
        monkeypatch.setattr(remote_module, "CALL_TIMEOUT_S", 0.3)
        files, threads = open_files(), threading.active_count()
        attempts = [near.connect(far) for _ in range(80)]
        for attempt in attempts:
            with pytest.raises(TransportError, match="does not answer"):
                attempt.result(60)
        assert near.submit(peer, "write", run_of(64)).wait(60) == "done"
        eventually(lambda: driver_of(near).peers == [peer])
        attempts.clear()  # their errors' tracebacks hold the watch of a process
        del attempt
        gc.collect()
        assert not files_left_open(files)
        eventually(lambda: threading.active_count() <= threads + 16)  # the workers, which are idle
    finally:
        for transport in (near, mute, good):
            transport.close()


def test_a_write_is_pending_until_the_peer_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may be working on it. A read ends when its peer is given up, and a later answer moves nothing."""
    uri = f"file://?path={tmp_path}"
    near, far = create_transport(uri), create_transport(uri)
    assert isinstance(far, RemoteTransport)
    try:
        own, theirs = near.allocate("near", 64), far.allocate("far", 64)
        theirs[:] = 7
        near.register([own])
        descriptor = far.register([theirs])
        writer, reader = near.connect(descriptor).result(60), near.connect(descriptor).result(60)
        library, held = library_of(far), []
        assert isinstance(library, FileLibrary)
        serve = library._answer_peer
        monkeypatch.setattr(library, "_answer_peer", lambda line, ask: held.append((line, ask)))
        write, read = near.submit(writer, "write", run_of(32)), near.submit(reader, "read", run_of(32, 32, 32))
        eventually(lambda: len(held) == 2)
        near.disconnect(reader)
        assert read.wait(60) == "failed"
        near.disconnect(writer)
        assert write.wait(0.2) == "pending"
        for line, ask in held:
            serve(line, ask)
        assert write.wait(60) != "pending"
        assert (int(own.sum()), int(theirs[:32].sum())) == (0, 0)
    finally:
        far.close()
        near.close()


# ---------------------------------------------------------------- descriptors and frames from strangers


@pytest.fixture
def far(tmp_path: Path) -> Iterator[RemoteTransport]:
    transport = create_transport(f"file://?path={tmp_path}/far")
    assert isinstance(transport, RemoteTransport)
    yield transport
    transport.close()


def altered(descriptor: bytes, **changes: object) -> bytes:
    parsed = msgspec.msgpack.decode(descriptor, type=RemoteDescriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(parsed, **changes))


def test_descriptors_that_no_transport_makes_are_refused(far: RemoteTransport) -> None:
    descriptor = far.register([far.allocate("far", 64)])
    contact = driver_of(far).lifeline.contact
    for changes, message in (
        ({"scheme": "nixl"}, "descriptor of 'nixl'"),
        ({"metadata": b"x"}, "is damaged"),
        ({"regions": [(0, 64)]}, "no memory"),
        ({"regions": [(4096, 0)]}, "no memory"),
        ({"regions": [(2**63 - 10, 64)]}, "no memory"),
        ({"contact": msgspec.structs.replace(contact, port=0)}, "out of range"),
        ({"contact": msgspec.structs.replace(contact, pid=-1)}, "out of range"),
        ({"contact": msgspec.structs.replace(contact, secret=b"")}, "out of range"),
    ):
        with pytest.raises(ProtocolError, match=message):
            parse_descriptor("file", altered(descriptor, **changes))
    with pytest.raises(ProtocolError, match="too long"):
        parse_descriptor("file", bytes(1 << 21))


def test_another_store_is_named_as_the_cause(far: RemoteTransport, tmp_path: Path) -> None:
    descriptor = far.register([far.allocate("far", 64)])
    near = create_transport(f"file://?path={tmp_path}/near")
    try:
        near.register([near.allocate("near", 64)])
        with pytest.raises(TransportError, match="do both engines use one directory"):
            near.connect(descriptor).result(60)
    finally:
        near.close()


def test_a_caller_without_the_secret_gets_nothing(far: RemoteTransport) -> None:
    contact = driver_of(far).lifeline.contact
    lifeline = Lifeline("127.0.0.1")
    try:
        with pytest.raises(TransportError, match=r"no answer|refused"):
            lifeline.dial(msgspec.structs.replace(contact, secret=bytes(16)))
        with socket.create_connection((contact.host, contact.port), 5) as stranger:
            stranger.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
            stranger.settimeout(60)
            assert stranger.recv(1) == b""
        line = lifeline.dial(contact)
        assert line.open()
    finally:
        lifeline.close()


@pytest.mark.parametrize(
    "message",
    [
        ["ask", 1, "write", "ab" * 16, b"123"],
        ["ask", 1, "write", "ab" * 16, np.array([[1], [8]], dtype=np.int64).tobytes()],
        ["ask", 1, "write", "../x", np.array([[1], [8]], dtype=np.int64).tobytes()],
        ["ask", 1, "read", "", np.array([[0], [2**62]], dtype=np.int64).tobytes()],
        ["ask", 1, "read", "", np.array([[0], [-1]], dtype=np.int64).tobytes()],
    ],
    ids=lambda message: f"{message[2]} {len(message[4])}",
)
def test_asks_outside_the_regions_are_refused(far: RemoteTransport, message: list[object]) -> None:
    region = far.allocate("far", 64)
    region[:] = pattern(64, 1)
    far.register([region])
    frame = answer_of(far, msgspec.msgpack.encode(message))
    assert frame is not None
    kind, number, _, error = msgspec.msgpack.decode(frame)
    assert (kind, number) == ("answer", 1)
    assert error
    assert np.array_equal(region, pattern(64, 1))


@pytest.mark.parametrize("frame", [b"\x95", b"\x95rubbish", msgspec.msgpack.encode(["ask", 1, "swap", "", b""])])
def test_frames_that_break_the_rules_end_the_line(far: RemoteTransport, frame: bytes) -> None:
    assert answer_of(far, frame) is None


def answer_of(far: RemoteTransport, frame: bytes) -> bytes | None:
    """The answer of `far` on a new line; None if it ends the line."""
    lifeline = Lifeline("127.0.0.1")
    try:
        line: Line = lifeline.dial(driver_of(far).lifeline.contact)
        line.send(frame)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for event in lifeline.wait(0.5):
                return event.frame
    finally:
        lifeline.close()
    raise AssertionError("no answer")


def test_an_answer_counts_only_on_the_line_that_was_asked(far: RemoteTransport) -> None:
    library = library_of(far)
    assert isinstance(library, FileLibrary)
    contact = driver_of(far).lifeline.contact
    lifeline = Lifeline("127.0.0.1")
    try:
        asked, line = lifeline.dial(contact), lifeline.dial(contact)
        watch = ProcessWatch(contact.pid, contact.start_time, contact.host_key)
        peer = RemotePeer("far", [], asked, watch, lambda peer: None)
        none = np.empty((2, 0), dtype=np.int64)
        batch = library._asked[7] = Batch(7, peer, "write", none, none)
        line.send(msgspec.msgpack.encode(["answer", 7, "", "gone"]))
        line.send(msgspec.msgpack.encode(["ask", 1, "read", "", b""]))
        while not lifeline.wait(1):
            pass
        assert 7 in library._asked
        assert batch.answer is None
    finally:
        lifeline.close()


def test_a_reused_pid_is_a_dead_process(far: RemoteTransport) -> None:
    contact = driver_of(far).lifeline.contact
    assert not ProcessWatch(contact.pid, contact.start_time, contact.host_key).dead()
    assert ProcessWatch(contact.pid, "1", contact.host_key).dead()
    # Nothing is known of another host's processes, whatever their numbers.
    assert not ProcessWatch(contact.pid, "1", "other").dead()


def test_a_process_of_another_time_namespace_is_not_taken_for_dead() -> None:
    """The start of a process is another number there."""
    told = "import os; from baton.transports.process import *; print(own_host_key()); print(process_start_ticks(%d))"
    unshare = ["unshare", "--map-root-user", "--time", "--boottime", "100000", "--fork"]
    command = [*unshare, sys.executable, "-c", told % os.getpid()]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode and "unshare" in found.stderr:
        pytest.skip(found.stderr)
    host_key, start_time = found.stdout.splitlines()
    assert start_time != process_start_ticks(os.getpid())
    assert not ProcessWatch(os.getpid(), start_time, host_key).dead()


# ---------------------------------------------------------------- batches


@given(
    st.lists(st.integers(0, 100), max_size=40),
    st.integers(1, 7),
    st.integers(1, 120),
    st.integers(1, 60),
)
def test_batches_cover_every_byte_once(sizes: list[int], max_runs: int, max_bytes: int, limit: int) -> None:
    nbytes = np.array(sizes, dtype=np.int64)
    starts = np.cumsum(nbytes) - nbytes
    rows = split_runs(np.stack([starts + 1000, starts, nbytes], axis=1), limit)
    assert [byte for near, far, n in rows.tolist() for byte in range(far, far + n)] == list(range(sum(sizes)))
    assert bool((rows[:, 0] == rows[:, 1] + 1000).all())
    assert max(rows[:, 2], default=0) <= max(limit, 0)
    bounds = batch_bounds(rows[:, 2], max_runs, max_bytes)
    assert bounds[0] == 0
    assert bounds[-1] == len(rows)
    for start, stop in itertools.pairwise(bounds):
        assert 1 <= stop - start <= max_runs
        assert stop - start == 1 or int(rows[start:stop, 2].sum()) <= max_bytes


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nixl://?prog_thread=1", "nixl has no option 'prog_thread'; known: host, backend"),
        ("nixl://?host=localhost", "host is a numeric address"),
        ("nixl://?speed=1", "nixl has no option 'speed'"),
        ("mooncake://?protocol=udp", "Invalid enum value 'udp'"),
        ("mooncake://?host=x", "host is a numeric address"),
        ("file://?max_bytes=0", "max_bytes is at least 1"),
        ("file://?path=/proc/none", "cannot use the directory /proc/none"),
        ("file://?path={tmp}&host=203.0.113.1", "cannot listen on host '203.0.113.1'"),
    ],
)
def test_refusals_name_the_cause(uri: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create_transport(uri.format(tmp=tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "modules", "message"),
    [
        ("nixl", ["nixl", "nixl_cu12", "nixl_cu13"], "nixl:// needs the package nixl-cu12: pip install"),
        ("mooncake", ["mooncake", "mooncake.engine"], "needs the package mooncake-transfer-engine-non-cuda"),
    ],
)
def test_a_missing_package_is_named(
    scheme: str, modules: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        create_transport(f"{scheme}://")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("libibverbs.so.1: cannot open shared object file: No such file or directory", "apt-get install libibverbs1"),
        ("libfancy.so.1: cannot open shared object file", "install the package that holds this library"),
    ],
)
def test_a_missing_shared_object_is_named(
    error: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(f"raise ImportError({error!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        create_transport("mooncake://")
    assert str(caught.value) == f"transport: mooncake does not load: {error}; {hint}"
    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_process_with_nixl_ends_well(tmp_path: Path) -> None:
    """With RDMA drivers installed, it crashes at exit unless the system's ibverbs library was loaded first."""
    uri = uri_of("nixl", tmp_path)
    code = (
        "import ctypes, importlib\n"
        "from baton.transports.registry import create_transport\n"
        "order, load, module = [], ctypes.CDLL, importlib.import_module\n"
        "ctypes.CDLL = lambda name, *rest: order.append(name) or load(name, *rest)\n"
        "importlib.import_module = lambda name: order.append(name) or module(name)\n"
        f"create_transport({uri!r}).close()\n"
        "assert order[0] == 'libibverbs.so.1' and any('nixl' in name for name in order[1:]), order\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
