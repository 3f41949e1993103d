"""Connections that break during copies, over a library whose batches end when the test says so."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.errors import ConfigError, ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.transports.base import ByteArray, DeviceMemory, Direction, Operation, Peer
from baton.transports.batches import Runs
from baton.transports.registry import create_transport
from baton.transports.remote import driver, mooncake
from baton.transports.remote import remote_transport as remote_module
from baton.transports.remote.library import BatchFailedError, Library, RemotePeer
from baton.transports.remote.lifeline import MAX_STRANGERS, RECEIVED_BYTES, Event, Lifeline, Line
from baton.transports.remote.remote_transport import MAX_REGIONS, HostOptions, RemoteTransport
from baton.transports.remote.tcp_buffers import LEAST_BYTES, held_bytes
from testkit.inside import driver_of
from testkit.waiting import eventually


@dataclass(eq=False)
class Batch:
    state: str = "moving"


class FakeLibrary(Library):
    scheme = "fake"

    def __init__(self, name: str, cuts: bool) -> None:
        self.name, self.cuts = name, cuts
        self.batches: list[Batch] = []
        self.begins = "moving"  # the state of new batches
        self.turns = 0
        self.at_end_of_turn: Callable[[], None] | None = None  # once
        self.added: list[str] = []
        self.removed: list[str] = []
        self.may_receive_rest = threading.Event()
        self.may_receive_rest.set()

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        self._bounce = bounce

    def stop(self) -> None: ...

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        return self.name, b""

    def register_device(self, memory: list[DeviceMemory]) -> tuple[str, bytes]:
        return self.name, b""

    def add(self, endpoint: str, metadata: bytes) -> None:
        self.added.append(endpoint)

    def remove(self, endpoint: str) -> bool:
        self.removed.append(endpoint)
        return self.cuts

    def issue(self, peer: RemotePeer, direction: Direction, rows: Runs) -> Any:
        if rows[0, 0] == self._bounce.ctypes.data:
            return Batch("done")
        self.batches.append(Batch(self.begins))
        return self.batches[-1]

    def check(self, handle: Batch) -> bool:
        if handle.state == "failed":
            raise TransportError("a batch failed")
        if handle.state == "refused":
            raise BatchFailedError("a batch was refused")
        return handle.state == "done"

    def ended(self, handle: Batch) -> bool:
        return self.cuts or handle.state != "moving"

    def progress(self) -> None:
        self.turns += 1
        then, self.at_end_of_turn = self.at_end_of_turn, None
        if then is not None:
            then()

    def receive_rest(self) -> None:
        assert self.may_receive_rest.wait(60)


class Side:
    """A transport over a fake library, with one region of 64 bytes."""

    def __init__(self, name: str, cuts: bool) -> None:
        self.library = FakeLibrary(name, cuts)
        self.transport = RemoteTransport(self.library, "127.0.0.1")
        self.descriptor = self.transport.register([self.transport.allocate(name, 64)])

    def submit(self, peer: Peer, direction: Direction = "write") -> Operation:
        return self.transport.submit(peer, direction, CopyList(0, 0, *[np.array([8], dtype=np.int64)] * 3))

    def batch(self) -> Batch:
        eventually(lambda: len(self.library.batches) == 1)
        return self.library.batches[0]

    def settle(self, state: str) -> None:
        self.batch().state = state
        driver_of(self.transport).lifeline.wake()


def still_pending(side: Side, operation: Operation) -> bool:
    """Whether it is, after turns of its driver in which it could have ended."""
    for _ in range(5):
        turned = threading.Event()
        driver_of(side.transport).post(turned.set)
        assert turned.wait(60)
    return operation.poll() == "pending"


@pytest.fixture(params=[True, False], ids=["cuts", "cannot cut"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    # A thread that misses its wake sleeps for ever.
    for module, name, seconds in ((remote_module, "CLOSE_TIMEOUT_S", 0.3), (driver, "IDLE_S", 3600.0)):
        monkeypatch.setattr(module, name, seconds)
    near, far = Side("near", request.param), Side("far", request.param)
    yield near, far
    for side in (near, far):
        side.library.may_receive_rest.set()
        side.transport.close()


# ---------------------------------------------------------------- operations of a broken connection


def test_queued_operations_end_with_the_connection(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    first, *queued = [near.submit(peer) for _ in range(4)]
    far.library.may_receive_rest.clear()
    near.settle("failed")
    assert [operation.wait(60) for operation in queued] == ["failed"] * 3
    assert still_pending(near, first)
    assert not peer.alive()


@pytest.mark.parametrize("sides", [True], indirect=True)
def test_a_write_that_failed_ends_once_the_peer_has_taken_in_what_was_sent(sides: tuple[Side, Side]) -> None:
    """Its bytes may still arrive at the peer, whose pages must not belong to another request by then."""
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    operation = near.submit(peer)
    far.library.may_receive_rest.clear()
    near.settle("failed")
    eventually(lambda: near.library.removed)
    assert not peer.alive()
    near.transport.cancel(operation)
    assert still_pending(near, operation)
    far.library.may_receive_rest.set()
    assert operation.wait(60) == "failed"
    assert operation.error == "fake: a batch failed"
    again = near.transport.connect(far.descriptor).result(60)
    near.library.batches.clear()
    operation = near.submit(again)
    near.settle("done")
    assert operation.wait(60) == "done"


@pytest.mark.parametrize("sides", [True], indirect=True)
def test_a_write_that_failed_ends_when_the_peer_cannot_be_asked(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    assert isinstance(peer, RemotePeer)
    operation = near.submit(peer)
    far.library.may_receive_rest.clear()
    near.settle("failed")
    eventually(lambda: near.library.removed)
    assert still_pending(near, operation)
    peer.line.abort()
    assert operation.wait(60) == "failed"


@pytest.mark.parametrize("sides", [True], indirect=True)
def test_a_read_that_failed_is_quiet(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    operation = near.submit(peer, "read")
    far.library.may_receive_rest.clear()
    near.settle("failed")
    assert operation.wait(60) == "failed"


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("state", ["done", "refused"])
def test_a_connection_is_cut_when_its_batch_has_ended(
    sides: tuple[Side, Side], state: str, direction: Direction
) -> None:
    """A library can neither stop a batch nor tell, once its peer is removed, whether it still runs."""
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    operation = near.submit(peer, direction)
    near.batch()
    near.transport.disconnect(peer)
    assert still_pending(near, operation)
    assert near.library.removed == []
    near.settle(state)
    assert operation.wait(60) == "failed"
    eventually(lambda: driver_of(near.transport).peers == [])
    assert near.library.removed == ["far"]


def test_a_connection_with_a_batch_under_way_is_used_again(sides: tuple[Side, Side]) -> None:
    """A new endpoint would lose the handle of the old batch."""
    near, far = sides
    old = near.transport.connect(far.descriptor).result(60)
    first = near.submit(old)
    near.batch()
    near.transport.disconnect(old)
    new = near.transport.connect(far.descriptor).result(60)
    near.settle("done")
    assert first.wait(60) == "failed"
    near.library.batches.clear()
    second = near.submit(new)
    near.settle("done")
    assert second.wait(60) == "done"
    assert (near.library.added, near.library.removed) == (["far"], [])
    near.transport.disconnect(new)
    eventually(lambda: near.library.removed == ["far"])


@pytest.mark.parametrize("sides", [False], indirect=True)
def test_a_word_of_the_peer_proves_nothing_of_what_this_side_does(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    operation = near.submit(peer)
    near.settle("failed")
    eventually(lambda: not peer.alive())
    for line in list(driver_of(far.transport)._announced):
        line.send(b"drained")
    assert still_pending(near, operation)


def test_copies_that_begin_together_do_not_each_take_a_turn(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = sides
    monkeypatch.setattr(driver, "_TURN_S", 60.0)  # a busy machine may take a turn's time for one step
    peer = near.transport.connect(far.descriptor).result(60)
    near.library.begins = "done"
    held = threading.Event()
    driver_of(near.transport).post(lambda: [held.wait(60)].clear())
    operations = [near.submit(peer) for _ in range(20)]
    before, after = near.library.turns, []
    operations[-1].add_done_callback(lambda: after.append(near.library.turns))
    held.set()
    assert [operation.wait(60) for operation in operations] == ["done"] * 20
    eventually(lambda: after)
    assert after[0] - before < 20


def test_a_call_runs_though_its_wake_was_taken(sides: tuple[Side, Side]) -> None:
    """It comes while the thread takes in what a lost peer had sent, at the end of a turn."""
    own, library, ran = driver_of(sides[0].transport), sides[0].library, threading.Event()

    def progress() -> None:
        own.post(ran.set)
        own._take_in()

    library.at_end_of_turn = progress
    own.lifeline.wake()
    assert ran.wait(60)


def test_a_cancel_does_not_wait_for_what_is_before_it(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    stuck, queued = near.submit(peer), near.submit(peer)
    near.batch()
    near.transport.cancel(queued)
    assert queued.wait(60) == "failed"
    assert queued.error == "cancelled after 0 of 1 batches"
    near.transport.cancel(stuck)
    assert still_pending(near, stuck)
    near.settle("done")
    assert stuck.wait(60) == "done"


def test_stuck_operations_hold_up_no_disconnect(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    operations = [near.submit(peer) for _ in range(20)]
    near.batch()
    near.transport.disconnect(peer)
    assert [operation.wait(60) for operation in operations[1:]] == ["failed"] * 19


def test_the_end_of_a_broken_connection_leaves_the_next_one_alone(sides: tuple[Side, Side]) -> None:
    near, far = sides
    old = near.transport.connect(far.descriptor).result(60)
    near.submit(old)
    near.settle("failed")
    eventually(lambda: not old.alive())
    new = near.transport.connect(far.descriptor).result(60)
    near.transport.disconnect(old)
    assert new.alive()
    near.library.batches.clear()
    operation = near.submit(new)
    near.settle("done")
    assert operation.wait(60) == "done"


def test_a_close_with_a_copy_under_way_proves_nothing_to_the_peer(sides: tuple[Side, Side]) -> None:
    near, far = sides
    peer, back = near.transport.connect(far.descriptor).result(60), far.transport.connect(near.descriptor).result(60)
    operation = near.submit(peer)
    near.batch()
    near.transport.close()
    eventually(lambda: not back.alive())
    # A BYE would have come before the end of the line.
    assert isinstance(back, RemotePeer)
    assert not back.gone()
    assert not back.fenced()
    if near.library.cuts:
        assert operation.wait(60) == "failed"


# ---------------------------------------------------------------- starts, registrations, descriptors


def test_a_library_that_does_not_start_is_one_line() -> None:
    class Broken(FakeLibrary):
        def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
            raise RuntimeError("no device")

    with pytest.raises(ConfigError) as caught:
        RemoteTransport(Broken("x", True), "127.0.0.1")
    assert str(caught.value) == "transport: fake does not start: no device"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_peers_need_an_address_that_they_can_reach(host: str) -> None:
    with pytest.raises(ValueError, match="an address that peers can reach"):
        HostOptions(host=host)


def test_regions_are_counted(sides: tuple[Side, Side]) -> None:
    transport = RemoteTransport(FakeLibrary("x", True), "127.0.0.1")
    try:
        region = transport.allocate("x", 8)
        for regions in ([], [region] * (MAX_REGIONS + 1)):
            with pytest.raises(TransportError, match="1 to 1024 regions"):
                transport.register(regions)
    finally:
        transport.close()


def test_descriptors_that_are_no_text_are_refused(sides: tuple[Side, Side]) -> None:
    near, far = sides
    broken = far.descriptor.replace(b"127.0.0.1", b"127.0.0.\xff")
    assert broken != far.descriptor
    with pytest.raises(ProtocolError, match="not a descriptor"):
        near.transport.connect(broken).result(60)
    with pytest.raises(ProtocolError, match="no numeric address: 'localhos1'"):
        near.transport.connect(far.descriptor.replace(b"127.0.0.1", b"localhos1")).result(60)


# ---------------------------------------------------------------- lifelines


@contextlib.contextmanager
def dialled() -> Iterator[tuple[Lifeline, Line]]:
    """A lifeline, and its line to another one that no longer reads."""
    one, two = Lifeline("127.0.0.1"), Lifeline("127.0.0.1")
    try:
        is_dialled = threading.Event()

        def answer() -> None:
            while not is_dialled.is_set():
                two.wait(0.05)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            line = one.dial(two.contact)
        finally:
            is_dialled.set()
            thread.join()
        yield one, line
    finally:
        one.close()
        two.close()


def test_a_line_that_takes_no_more_frames_ends() -> None:
    """Both sides would wait for an omitted frame."""
    with dialled() as (_, line):
        frame = bytes(4096 - 4)
        for _ in range(1 << 14):
            if not line.open():
                break
            line.send(frame)
        assert not line.open()


def test_a_full_line_ends_at_the_first_frame_that_does_not_fit() -> None:
    class Full:
        shut = False

        def send(self, data: object, flags: int) -> int:
            raise BlockingIOError

        def shutdown(self, how: int) -> None:
            self.shut = True

    full = Full()
    Line(full, admitted=True).send(b"x")  # type: ignore[arg-type]
    assert full.shut


def test_strangers_take_a_bounded_number_of_sockets() -> None:
    lifeline = Lifeline("127.0.0.1")
    callers = []
    try:
        contact = lifeline.contact
        for _ in range(MAX_STRANGERS + 10):
            callers.append(socket.create_connection((contact.host, contact.port), 5))
            lifeline.wait(0.2)
        lines = [key.data for key in lifeline._selector.get_map().values() if key.data is not None]
        assert len(lines) == MAX_STRANGERS
        callers[0].settimeout(60)
        assert callers[0].recv(1) == b""
        callers[-1].sendall(len(contact.secret).to_bytes(4, "big") + contact.secret)
        lifeline.wait(1)
        callers[-1].settimeout(60)
        assert callers[-1].recv(64) == b"\0\0\0\x07welcome"
    finally:
        for caller in callers:
            caller.close()
        lifeline.close()


def test_a_line_that_is_dialled_while_its_lifeline_closes_is_closed() -> None:
    one, two = Lifeline("127.0.0.1"), Lifeline("127.0.0.1")
    with contextlib.closing(two), ThreadPoolExecutor(1) as pool:
        one.close()
        dialling = pool.submit(one.dial, two.contact)
        while not dialling.done():
            two.wait(0.05)
        with pytest.raises(TransportError, match="is closed"):
            dialling.result()


def test_a_line_that_is_hung_up_at_once_disturbs_nobody() -> None:
    with dialled() as (one, line):
        one.hang_up(line)
        assert one.wait(0) == []
    one.wake()


def test_the_bytes_a_socket_may_hold_are_the_kernels_limits(tmp_path: Path) -> None:
    """A process that drains what a dead peer had sent counts bytes, and must not stop before the last."""
    assert held_bytes(tmp_path / "hidden") == LEAST_BYTES
    (tmp_path / "ipv4").mkdir()
    (tmp_path / "core").mkdir()
    for name, text in (
        ("ipv4/tcp_rmem", "4096\t131072\t67108864\n"),
        ("ipv4/tcp_wmem", "4096 16384 4194304"),
        ("core/rmem_max", "212992\n"),
        ("core/wmem_max", "134217728\n"),
    ):
        (tmp_path / name).write_text(text)
    assert held_bytes(tmp_path) == (64 << 20) + (256 << 20)


def test_a_fence_takes_in_all_that_sockets_hold(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = sides
    peer = near.transport.connect(far.descriptor).result(60)
    turns: list[float] = []
    lifeline = driver_of(near.transport).lifeline
    real = lifeline.wait

    def wait(timeout_s: float) -> list[Event]:
        turns.append(timeout_s)
        return real(timeout_s)

    monkeypatch.setattr(driver, "held_bytes", lambda: 1000 * RECEIVED_BYTES)
    monkeypatch.setattr(lifeline, "wait", wait)
    far.transport.close()
    eventually(peer.fenced)
    assert turns.count(0) >= 1000


# ---------------------------------------------------------------- mooncake


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Mooncake's engine, which copies nothing; a batch takes until `go_on` is set."""
    go_on, opened = threading.Event(), set()

    def copy(endpoint: str, near: list[int], far: list[int], nbytes: list[int]) -> int:
        if nbytes != [1]:
            go_on.wait(60)
        return 0

    fake = SimpleNamespace(
        go_on=go_on,
        opened=opened,
        initialize=lambda *arguments: 0,
        get_rpc_port=lambda: 4321,
        register_memory=lambda address, nbytes: opened.add(address) or 0,
        unregister_memory=opened.remove,
        batch_transfer_sync_write=copy,
        batch_transfer_sync_read=copy,
    )
    monkeypatch.setattr(mooncake, "load_engine", lambda: lambda: fake)
    monkeypatch.setattr(remote_module, "CLOSE_TIMEOUT_S", 0.2)
    return fake


def test_mooncakes_memory_outlives_a_batch_that_outlives_the_transport(engine: SimpleNamespace) -> None:
    near, far = create_transport("mooncake"), create_transport("mooncake")
    region = near.allocate("near", 64)
    near.register([region])
    peer = near.connect(far.register([far.allocate("far", 64)])).result(60)
    near.submit(peer, "write", CopyList(0, 0, *[np.array([8], dtype=np.int64)] * 3))
    assert isinstance(peer, RemotePeer)
    eventually(lambda jobs=peer.jobs: jobs and jobs[0].handle is not None)
    del peer
    near.close()
    far.close()
    assert engine.opened == set()
    alive = weakref.ref(region)
    del near, region
    gc.collect()
    assert alive() is not None
    engine.go_on.set()


@pytest.mark.parametrize("endpoint", ["", "host:1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x", "127.0.0.1"])
def test_endpoints_that_mooncake_does_not_make_are_refused(endpoint: str, engine: SimpleNamespace) -> None:
    with pytest.raises(ProtocolError, match="not an endpoint of mooncake"):
        mooncake.MooncakeLibrary(mooncake.MooncakeOptions()).add(endpoint, b"")
