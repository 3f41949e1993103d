"""Control connections over real sockets: keys, access, sessions and their limits."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zmq

from baton.doctor.ask import is_open
from baton.errors import ConfigError, ProtocolError
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.messages import AttemptKey, Bye, Cancel, ControlMessage, Hello, Renew
from baton.handoff.session import accepted
from baton.handoff.session import sockets as channels
from baton.handoff.session.base import Connection
from baton.handoff.session.curve import as_client
from baton.handoff.session.keys import KeyRing, Keys, TicketKeys, check_bind, is_local, make_keys, ticket_key_file
from baton.handoff.session.sockets import Channel
from baton.log_limit import LINES_PER_SECOND, LogLimit
from testkit.inside import accepted_of
from testkit.processes.leftovers import files_left_open, open_files

KEYS = TicketKeys(b"k" * 32)
LOOPBACK = "tcp://127.0.0.1:*"
Received = list[tuple[Connection, ControlMessage]]


def hello(engine_id: str) -> Hello:
    return Hello(engine_id, f"{engine_id}-1", {}, Instance(rank=0, groups={}), bytes(16))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["P", "D"])
    return tmp_path / "keys"


@pytest.fixture
def opened() -> Iterator[Callable[..., Channel]]:
    made: list[Channel] = []

    def make(bind: str = LOOPBACK, keys: Keys = KEYS) -> Channel:
        made.append(Channel(bind, keys))
        return made[-1]

    yield make
    for one in made:
        one.close()


def exchange(*ends: Channel, until: Callable[[], bool], limit_s: float = 60.0) -> dict[Channel, Received]:
    """Let channels receive until a condition holds. Returns what each received."""
    got: dict[Channel, Received] = {end: [] for end in ends}
    deadline = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline, {end: (end.frames, end.refused) for end in ends}
        for end in ends:
            got[end] += end.receive(0.01)
    return got


def test_two_engines_with_keys_know_each_other(opened: Callable[..., Channel], directory: Path) -> None:
    p, d = opened(keys=KeyRing(directory, "P")), opened(keys=KeyRing(directory, "D"))
    assert p.address.startswith("curve://P@127.0.0.1:")
    connection = d.dial(p.address)
    d.send(connection, hello("D"))
    got = exchange(p, d, until=lambda: p.frames == 1)
    assert [(c.engine, m) for c, m in got[p]] == [("D", hello("D"))]
    p.send(got[p][0][0], hello("P"))
    got = exchange(p, d, until=lambda: d.frames == 1)
    assert got[d] == [(connection, hello("P"))]
    assert (p.refused, p.malformed, d.malformed) == (0, 0, 0)


def test_hello_must_come_from_the_engine_whose_key_it_is(
    opened: Callable[..., Channel], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(directory, ["E"])
    p, e = opened(keys=KeyRing(directory, "P")), opened(keys=KeyRing(directory, "E"))
    e.send(e.dial(p.address), hello("D"))
    got = exchange(p, e, until=lambda: p.malformed == 1)
    assert got[p] == []
    assert "HELLO of engine 'D' came with the key of 'E'" in caplog.text
    # It must also come from the engine that was dialled: here another one answers in its name.
    d = opened(keys=KeyRing(directory, "D"))
    connection = d.dial(p.address)
    d.send(connection, hello("D"))
    got = exchange(p, d, until=lambda: p.frames == 2)
    p.send(got[p][0][0], hello("E"))
    got = exchange(p, d, until=lambda: d.malformed == 1)
    assert got[d] == []


def test_an_engine_joins_and_leaves_at_run_time(opened: Callable[..., Channel], directory: Path) -> None:
    p = opened(keys=KeyRing(directory, "P"))
    make_keys(directory, ["F"])
    ring = KeyRing(directory, "F")
    f = opened(keys=ring)
    f.send(f.dial(p.address), hello("F"))
    exchange(p, f, until=lambda: p.frames == 1)
    (directory / "public" / "F.pub").unlink()
    again = opened(keys=ring)
    with pytest.raises(ProtocolError, match="not among the authorised"):
        again.dial(p.address.replace("P@", "F@"))
    again.send(again.dial(p.address), hello("F"))
    exchange(p, again, until=lambda: p.refused >= 1)
    assert p.frames == 1


def test_no_downgrade_in_either_direction(opened: Callable[..., Channel], directory: Path) -> None:
    bare, p = opened(), opened(keys=KeyRing(directory, "P"))
    with pytest.raises(ProtocolError, match="asks for keys"):
        bare.dial(p.address)
    for address in (bare.address, "curve://127.0.0.1:1", "curve://"):
        with pytest.raises(ProtocolError, match="has no keys"):
            p.dial(address)
    with pytest.raises(ProtocolError, match="on another host"):
        bare.dial("tcp://10.0.0.1:5555")
    with pytest.raises(ProtocolError, match="cannot dial"):
        bare.dial("tcp://127.0.0.1:abc")
    with pytest.raises(ProtocolError, match="cannot dial"):
        p.dial("curve://D@nowhere")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        (LOOPBACK, True),
        ("tcp://127.8.0.1:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("ipc:///tmp/x", True),
        ("tcp://*:5", False),
        ("tcp://0.0.0.0:5", False),
        ("tcp://10.0.0.1:5", False),
        ("tcp://example.org:5", False),
        ("tcp://127.0.0.1.example.org:5", False),
        ("udp://127.0.0.1:5", False),
        ("127.0.0.1:5", False),
        ("", False),
    ],
)
def test_without_keys_only_loopback(address: str, local: bool) -> None:
    assert is_local(address) is local
    if local:
        check_bind(address, has_keys=False)
    else:
        with pytest.raises(ConfigError, match=r"control_bind: .*baton keys"):
            check_bind(address, has_keys=False)
        with pytest.raises(ConfigError, match="control_bind"):
            Channel(address, KEYS)


def test_with_keys_the_address_can_be_dialled() -> None:
    check_bind("tcp://10.0.0.1:*", has_keys=True)
    with pytest.raises(ConfigError, match="is not tcp"):
        check_bind("ipc:///tmp/x", has_keys=True)


@pytest.mark.parametrize("address", ["tcp://*:5", "tcp://0.0.0.0:*", "tcp://[::]:5"])
def test_with_keys_an_address_of_every_interface_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="names no interface"):
        check_bind(address, has_keys=True)


def test_key_directories_are_made_and_checked(directory: Path) -> None:
    assert make_keys(directory, ["P"]) == []
    assert (directory / "secret" / "P.key").stat().st_mode & 0o777 == 0o600
    assert (directory / "secret").stat().st_mode & 0o077 == 0
    assert (directory / "public" / "P.pub").stat().st_mode & 0o777 == 0o644
    assert ticket_key_file(directory).stat().st_mode & 0o777 == 0o600
    ring = KeyRing(directory, "P")
    assert ring.public_of("P") == ring.public
    assert ring.public_of("../secret/P") is None
    assert ring.engine_of(bytes(32)) is None
    assert ring.engine_of(b"short") is None
    with pytest.raises(ConfigError, match="does not exist"):
        ticket_key_file(directory / "none")


@pytest.mark.parametrize("bad", ["", "../x", "a/b", "a" * 65, "x\n"])
def test_an_invalid_engine_id_gets_no_key(directory: Path, bad: Any) -> None:
    with pytest.raises(ConfigError, match="no engine id"):
        make_keys(directory, [bad])


@pytest.mark.parametrize(
    ("file", "change", "what"),
    [
        ("secret/P.key", "unlink", "cannot read"),
        ("secret/P.key", "readable", "chmod go-rwx"),
        ("secret/P.key", "garbage", "does not hold a CURVE key"),
        ("public/D.pub", "garbage", "does not hold a CURVE key"),
        ("public/D.pub", "writable", "chmod go-w"),
        ("public", "writable", "chmod go-w"),
        ("secret", "writable", "chmod go-w"),
        ("", "writable", "chmod go-w"),
        ("public/P.pub", "unlink", "does not belong"),
        ("public/D.pub", "swap", "same key"),
    ],
)
def test_bad_key_files_are_named(directory: Path, file: str, change: str, what: str) -> None:
    path = directory / file
    if change == "unlink":
        path.unlink()
    elif change == "readable":
        path.chmod(0o644)
    elif change == "writable":
        path.chmod(0o777)
    elif change == "swap":
        path.write_bytes((directory / "public" / "P.pub").read_bytes())
    else:
        path.write_bytes(b"#" * 40)
    with pytest.raises(ConfigError, match=what):
        KeyRing(directory, "P")


def test_a_damaged_key_shuts_out_its_own_engine_alone(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a file that is being copied while engines run."""
    ring, file = KeyRing(directory, "P"), directory / "public" / "D.pub"
    whole = file.read_bytes()
    file.write_bytes(whole[:10])
    assert ring.public_of("D") is None
    assert ring.public_of("P") == ring.public
    assert "engine D is shut out: " in caplog.text
    file.write_bytes(whole)
    assert ring.public_of("D") == whole.strip()


# ---------------------------------------------------------------- sessions


class Stranger:
    """Raw DEALERs towards one address."""

    def __init__(self, address: str) -> None:
        self.address, self.context = address, zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def connect(self) -> zmq.Socket[bytes]:
        sock = self.context.socket(zmq.DEALER)
        as_client(sock, KEYS, KEYS.public)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(self.address)
        self.sockets.append(sock)
        return sock

    def close(self) -> None:
        for sock in self.sockets:
            sock.close(0)
        self.context.term()


@pytest.fixture
def p(opened: Callable[..., Channel]) -> Channel:
    return opened()


@pytest.fixture
def stranger(p: Channel) -> Iterator[Stranger]:
    made = Stranger(p.address)
    yield made
    made.close()


def test_a_new_session_on_one_connection_ends_the_old(p: Channel, stranger: Stranger) -> None:
    sock = stranger.connect()
    for session in (1, 2, 3):
        sock.send(encode_frame(hello("D"), session, 1))
    got = exchange(p, until=lambda: p.frames == 3)[p]
    sessions = [(c.session, type(m)) for c, m in got]
    assert sessions == [(1, Hello), (1, Bye), (2, Hello), (2, Bye), (3, Hello)]
    assert len(accepted_of(p)) == accepted_of(p).num_unproven == 1


def test_strangers_make_room_and_proven_peers_stay(
    p: Channel, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "MAX_UNPROVEN", 4)
    stranger.connect().send(encode_frame(hello("D"), 1, 1))
    ((peer, _),) = exchange(p, until=lambda: p.frames == 1)[p]
    peer.proven = True
    for session in range(2, 12):
        stranger.connect().send(encode_frame(hello(f"X{session}"), session, 1))
    got = exchange(p, until=lambda: p.frames == 11)[p]
    ended = [c for c, m in got if isinstance(m, Bye)]
    assert len(ended) == p.evicted == 6
    assert peer not in ended
    assert accepted_of(p).num_unproven == 4
    assert len(accepted_of(p)) == 5
    stranger.sockets[0].send(encode_frame(Bye("x"), 1, 2))
    assert exchange(p, until=lambda: p.frames == 12)[p] == [(peer, Bye("x"))]
    p.drop(peer)
    assert len(accepted_of(p)) == 4


def test_sessions_are_bounded(p: Channel, stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted, "MAX_SESSIONS", 3)
    monkeypatch.setattr(accepted, "MAX_UNPROVEN", 2)
    for session in range(1, 4):
        stranger.connect().send(encode_frame(hello("D"), session, 1))
        exchange(p, until=lambda session=session: p.frames == session)[p][-1][0].proven = True
    stranger.connect().send(encode_frame(hello("D"), 9, 1))
    assert exchange(p, until=lambda: p.malformed == 1)[p] == []
    assert len(accepted_of(p)) == 3


def test_unknown_sessions_are_told_and_repeats_dropped(p: Channel, stranger: Stranger) -> None:
    sock = stranger.connect()
    sock.send(encode_frame(hello("D"), 5, 2))
    sock.send(encode_frame(hello("D"), 5, 2))
    sock.send(encode_frame(hello("D"), 5, 1))
    other = stranger.connect()
    ((connection, _),) = exchange(p, until=lambda: p.frames == 3)[p]
    assert connection.received == 2
    p.send(connection, Bye("x"))
    assert sock.poll(60_000)
    other.send(encode_frame(Cancel(AttemptKey(bytes(16), 0, "P-1", "D-1"), "x"), 5, 1))
    exchange(p, until=lambda: p.frames == 4)
    assert other.poll(60_000)
    assert b"unknown_session" in other.recv()


@pytest.mark.parametrize("length", [0, 5, 31, 33])
def test_a_key_of_another_length_is_nobodys(length: int) -> None:
    assert KEYS.engine_of(bytes(length)) is None


def test_messages_unread_at_the_close_are_answered() -> None:
    """Otherwise a peer whose session had just begun would wait for an answer, or for a fence that never comes."""
    p = Channel(LOOPBACK, KEYS)
    stranger = Stranger(p.address)
    sock = stranger.connect()
    sock.send_multipart([b"a", b"b"])
    sock.send(encode_frame(hello("D"), 5, 1))
    arrived = time.monotonic() + 60
    while not p._router.poll(20):
        assert time.monotonic() < arrived
        for gate in p._gate.sockets:
            p._gate.serve(gate)  # the handshake
    p.close(Bye("engine_closed", quiet=True))
    assert sock.poll(60_000)
    session, _, message = decode_frame(sock.recv())
    assert (session, message) == (5, Bye("engine_closed", quiet=True))
    stranger.close()


def test_a_close_lets_go_of_an_address_where_nobody_is() -> None:
    channel = Channel(LOOPBACK, KEYS)
    channel.send(channel.dial("tcp://127.0.0.1:1"), hello("D"))
    with mock.patch.object(channels, "_LAST_LINGER_MS", 3_600_000):  # longer than this test may take
        channel.close()


def test_a_session_that_was_dropped_is_heard_again_after_hello(opened: Callable[..., Channel]) -> None:
    """P forgot D's session, and counts from 1 in the session that D's next HELLO begins."""
    p, d = opened(), opened()
    connection = d.dial(p.address)
    d.send(connection, hello("D"))
    ((at_p, _),) = exchange(p, d, until=lambda: p.frames == 1)[p]
    p.send(at_p, Renew(1.0, 1))
    p.send(at_p, Renew(1.0, 2))
    exchange(p, d, until=lambda: d.frames == 2)
    p.drop(at_p)
    d.send(connection, hello("D"))
    ((at_p, _),) = exchange(p, d, until=lambda: p.frames == 2)[p]
    p.send(at_p, hello("P"))
    p.send(at_p, Renew(1.0, 3))
    got = exchange(p, d, until=lambda: d.frames == 4)
    assert [message for _, message in got[d]] == [hello("P"), Renew(1.0, 3)]


@pytest.mark.parametrize("client", ["no keys", "another server's key", "unknown key"])
def test_connections_without_the_right_keys_are_counted(
    opened: Callable[..., Channel], directory: Path, caplog: pytest.LogCaptureFixture, client: str
) -> None:
    keyed = opened(keys=KeyRing(directory, "P"))
    caller = Stranger(keyed.address.replace("curve://P@", "tcp://"))
    sock = caller.context.socket(zmq.DEALER)
    if client != "no keys":
        server = zmq.curve_keypair()[0] if client == "another server's key" else KeyRing(directory, "P").public
        sock.curve_serverkey = server
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.connect(caller.address)
    sock.send(encode_frame(hello("D"), 1, 1))
    try:
        exchange(keyed, until=lambda: keyed.refused > 0)
    finally:
        sock.close(0)
        caller.close()
    assert keyed.frames == 0
    assert ("is not authorised" if client == "unknown key" else "a connection was refused") in caplog.text


def test_the_port_check_of_the_doctor_is_no_refused_connection(
    opened: Callable[..., Channel], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyed = opened(keys=KeyRing(directory, "P"))
    host, port = keyed.address.rpartition("@")[2].rsplit(":", 1)
    for _ in range(3):
        assert asyncio.run(is_open(host, int(port), 5.0))
    # The listener sees connections in order: those above before this one.
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        stranger.curve_serverkey = zmq.curve_keypair()[0]
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(f"tcp://{host}:{port}")
        exchange(keyed, until=lambda: keyed.refused > 0)
    assert keyed.refused == 1
    assert caplog.text.count("was refused") == 1


def test_log_lines_are_few_and_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("tests.log_limit")
    limit = LogLimit()
    log.addFilter(limit)
    records = [log.makeRecord(log.name, logging.WARNING, "f", 1, "bad %s", ("a\nb\x1b[2J",), None) for _ in range(99)]
    for record in records:
        record.created = 1000.5
    assert sum(limit.filter(record) for record in records) == LINES_PER_SECOND
    assert records[0].getMessage() == "bad a\\nb\\x1b[2J"
    later = log.makeRecord(log.name, logging.WARNING, "f", 1, "100% of it", (), None)
    later.created = 1001.0
    assert limit.filter(later)
    assert later.getMessage() == "100% of it (and 79 more that were not logged)"


def test_a_channel_that_cannot_be_opened_names_its_address_and_keeps_no_descriptor() -> None:
    """The address is taken, or there are too few descriptors for any of the channel's sockets."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="control_bind: cannot listen at tcp://127"):
            Channel(f"tcp://127.0.0.1:{taken.getsockname()[1]}", KEYS)
        before, highest = open_files(), max(int(fd) for fd in os.listdir("/proc/self/fd"))
        failed = 0
        try:
            for files in range(3, highest + 40):
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
                try:
                    Channel(LOOPBACK, KEYS).close()
                except ConfigError as error:
                    assert error.field == "kv_transfer_config.control_bind"  # noqa: PT017
                    failed += 1
                else:
                    break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert failed > 5
        assert not files_left_open(before)
