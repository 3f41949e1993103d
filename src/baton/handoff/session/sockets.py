"""Control connections of one rank over ZeroMQ (docs/protocol.md, "Channel")."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import zmq

from baton.errors import ConfigError, ProtocolError
from baton.handoff.protocol.frames import MAX_FRAME, PROTOCOL_VERSION, decode_frame, encode_frame, other_version
from baton.handoff.protocol.messages import Bye, ControlMessage, Hello
from baton.handoff.session.accepted import AcceptedConnections
from baton.handoff.session.addresses import ControlEndpoint, endpoint_of
from baton.handoff.session.base import Connection, NoSession
from baton.handoff.session.curve import Gate, Socket, as_client
from baton.handoff.session.dialled import DialMonitors
from baton.handoff.session.keys import CONTROL_BIND, Keys, check_bind
from baton.handoff.session.seals import check_seal, seal_of
from baton.log_limit import LogLimit
from baton.zeromq import begin_ids_at_random

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

_BURST = 256
# Frames queued in one connection before its sender is held back.
_QUEUE = 128
# A context, a ROUTER with monitor and authentication, and a pair that wakes use 12 (measured).
_NUM_DESCRIPTORS = 24
# Milliseconds for frames to leave when one session ends, and when all do. Without a BYE a peer waits for its fence.
_LINGER_MS, _LAST_LINGER_MS = 200, 5000
# Unread frames answered when the channel closes, at most.
_LAST_FRAMES = 4096
# A BYE ends a session whatever sequence number the receiver has reached.
_LAST_SEQUENCE = (1 << 63) - 1
_RECONNECT_MS = (100, 2000)
# Shortages that may pass.
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}
Heard = tuple[Connection, ControlMessage | NoSession]


def _need_descriptors() -> None:
    """Raise `OSError` if the channel's sockets would not get their file descriptors. ZeroMQ 4.3.5 ends the process if
    a context gets none (`epoll_t`)."""
    with contextlib.ExitStack() as opened:
        for _ in range(_NUM_DESCRIPTORS):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


class Channel:
    """All connections of one rank. Not thread-safe, except `wake` and the counters.

    `malformed`: could not be decoded. `dropped`: could not be sent. `evicted`: closed to make room. `refused`:
    connections not admitted.

    Raises `ConfigError`.
    """

    def __init__(self, bind: str, keys: Keys) -> None:
        self._named = keys.engine_id is not None
        check_bind(bind, self._named)
        self._keys = keys
        begin_ids_at_random()
        context: zmq.Context[Any] | None = None
        try:
            _need_descriptors()
            self._context = context = zmq.Context()
            self._router = self._socket(zmq.ROUTER)
            self._gate = Gate(self._context, self._router, keys)
            self._router.bind(bind)
            self._wake_in, self._wake_out = socket.socketpair()
        except (zmq.ZMQError, OSError) as error:
            if context is not None:
                context.destroy(0)
            raise ConfigError(CONTROL_BIND, f"cannot listen at {bind}: {error}") from error
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.replace("tcp://", f"curve://{keys.engine_id}@", 1) if self._named else endpoint
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        for readable in (self._router, self._wake_out, *self._gate.sockets):
            self._poller.register(readable, zmq.POLLIN)
        self._accepted = AcceptedConnections()
        self._dialled: dict[Socket, Connection] = {}
        self._monitors = DialMonitors(context, self._poller)
        self.frames = 0
        self.malformed = 0
        self.dropped = 0

    @property
    def evicted(self) -> int:
        return self._accepted.evicted

    @property
    def refused(self) -> int:
        return self._gate.refused

    def _socket(self, kind: int) -> Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        sock.setsockopt(zmq.RCVHWM, _QUEUE)
        return sock

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes too; a closed one has no reader
            self._wake_in.send(b"\0")

    def dial(self, address: str) -> Connection:
        """Without a free file descriptor, each `send` tries again to open the socket, and its message is lost."""
        endpoint = self._endpoint(address)
        connection = Connection(secrets.randbits(62), None, address=address, engine=endpoint.engine)
        self._open(connection, endpoint)
        return connection

    def _open(self, connection: Connection, endpoint: ControlEndpoint) -> None:
        sock = None
        try:
            sock = self._socket(zmq.DEALER)
            sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
            sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
            as_client(sock, self._keys, endpoint.public_key)
            self._monitors.add(sock, connection)
            sock.connect(endpoint.address)
        except zmq.ZMQError as error:
            if sock is not None:
                self._monitors.remove(sock)
                sock.close()
            if error.errno not in _SCARCE:
                raise ProtocolError(f"cannot dial {connection.address!r}: {error}") from error
            log.warning("cannot dial %s yet: %s", connection.address, error)
            return
        connection.socket = sock
        self._dialled[sock] = connection
        self._poller.register(sock, zmq.POLLIN)

    def _is_open(self, connection: Connection) -> bool:
        if connection.socket is None:
            with contextlib.suppress(ProtocolError):  # the peer's key was removed
                self._open(connection, self._endpoint(connection.address))
        return connection.socket is not None

    def _endpoint(self, address: str) -> ControlEndpoint:
        return endpoint_of(address, self._keys)

    def drop(self, connection: Connection) -> None:
        if connection.identity is not None:
            self._accepted.drop(connection.identity, connection)
        elif connection.socket is not None and self._dialled.pop(connection.socket, None) is not None:
            self._poller.unregister(connection.socket)
            self._monitors.remove(connection.socket)
            connection.socket.close()

    def send(self, connection: Connection, message: ControlMessage) -> None:
        """A full or broken connection drops the message; the waiting side repeats it."""
        last = isinstance(message, Bye)
        frame = encode_frame(message, connection.session, _LAST_SEQUENCE if last else connection.sent + 1)
        connection.sent += 1
        if not self._is_open(connection):
            self.dropped += 1
            return
        self._transmit(connection.socket, connection.identity, frame, *seal_of(connection, frame))

    def _transmit(self, sock: Socket, identity: bytes | None, *frame: bytes) -> None:
        try:
            sock.send_multipart(frame if identity is None else [identity, *frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1

    def receive(self, timeout_s: float) -> Iterator[Heard]:
        """Wait for messages or `wake`. Malformed frames are only counted.

        A session that was evicted, or replaced by its peer, yields a BYE. A frame is read after the previous message is
        handled, so a peer that has just proven itself is not evicted.
        """
        for ready, _ in self._poller.poll(max(0, round(timeout_s * 1000))):
            if ready == self._wake_out.fileno():
                self._drain_wake()
            elif ready in self._gate.sockets:
                self._gate.serve(ready)
            elif ready in self._monitors:
                yield self._monitors.failed(ready)
            else:
                yield from self._read(ready)

    def _read(self, ready: Socket) -> Iterator[Heard]:
        accepted = ready is self._router
        for _ in range(_BURST):  # one busy peer must not starve the others
            try:
                parts = ready.recv_multipart(zmq.NOBLOCK, copy=not accepted or not self._named)
            except zmq.ZMQError:
                return
            self.frames += 1
            self._monitors.remove(ready)
            try:
                received = self._accept(parts) if accepted else self._answered(ready, parts)
            except ProtocolError as error:
                self.malformed += 1
                log.warning("dropped a message: %s", error)
                yield from self._other_version(ready, [bytes(part) for part in parts])
                continue
            yield from received

    def _other_version(self, ready: Socket, parts: list[bytes]) -> list[Heard]:
        """Answered in our version, so that the dialling engine learns of both."""
        connection = self._dialled.get(ready)
        frames = parts if ready is not self._router else parts[1:]
        version = other_version(frames[0]) if frames and len(frames[0]) <= MAX_FRAME else None
        if version is None:
            return []
        if ready is self._router:
            self._transmit(ready, parts[0], encode_frame(Bye("other_version"), 0, _LAST_SEQUENCE))
        if connection is None:
            return []
        text = f"{connection.address} has version {version} of the handoff protocol, this engine {PROTOCOL_VERSION}"
        return [(connection, NoSession("incompatible_peer", text))]

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _accept(self, parts: list[Any]) -> list[tuple[Connection, ControlMessage]]:
        if not 2 <= len(parts) <= 3:
            raise ProtocolError(f"{len(parts)} frame parts where 2 or 3 are due")
        engine: str | None = None
        if self._named:
            engine = parts[1].get("User-Id")
            parts = [part.bytes for part in parts]
        identity, frame, *mark = parts
        session, sequence, message = decode_frame(frame)
        connection = self._accepted.get(identity)
        ended: list[tuple[Connection, ControlMessage]] = []
        if connection is None or connection.session != session or connection.engine != engine:
            if not isinstance(message, Hello):
                if not isinstance(message, Bye):
                    bye = encode_frame(Bye("unknown_session"), session, _LAST_SEQUENCE)
                    self._transmit(self._router, identity, bye)
                return []
            if engine is not None and message.engine_id != engine:
                raise ProtocolError(f"HELLO of engine {message.engine_id!r} came with the key of {engine!r}")
            ended = [(old, Bye("replaced")) for old in self._accepted.make_room(identity)]
            connection = Connection(session, self._router, identity, engine=engine)
            self._accepted.add(identity, connection)
        return ended + self._in_order(connection, sequence, check_seal(connection, "dialled", message, frame, mark))

    def _answered(self, sock: Socket, parts: list[bytes]) -> list[tuple[Connection, ControlMessage]]:
        connection = self._dialled.get(sock)
        if connection is None:
            return []
        if not 1 <= len(parts) <= 2:
            raise ProtocolError(f"{len(parts)} frame parts where 1 or 2 are due")
        frame, *mark = parts
        session, sequence, message = decode_frame(frame)
        if session != connection.session:
            return []
        if isinstance(message, Hello) and connection.engine not in (None, message.engine_id):
            raise ProtocolError(f"HELLO of engine {message.engine_id!r} came with the key of {connection.engine!r}")
        if isinstance(message, Hello):
            # The other side may have begun this session again, counting from 1.
            connection.received = 0
        return self._in_order(connection, sequence, check_seal(connection, "answered", message, frame, mark))

    def _in_order(
        self, connection: Connection, sequence: int, message: ControlMessage
    ) -> list[tuple[Connection, ControlMessage]]:
        if sequence <= connection.received:
            return []
        connection.received = sequence
        return [(connection, message)]

    def close(self, farewell: Bye | None = None) -> None:
        """Sent frames get time to leave. `farewell` answers unread frames, so a peer that has just opened a session
        learns that this engine is gone.
        """
        if farewell is not None:
            self._answer_unread(farewell)
        for sock, connection in self._dialled.items():
            self._monitors.remove(sock)
            sock.close(linger=_LAST_LINGER_MS if connection.received else 0)
        self._gate.close()
        self._router.close(linger=_LAST_LINGER_MS)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def _answer_unread(self, farewell: Bye) -> None:
        for _ in range(_LAST_FRAMES):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                session, _, message = decode_frame(frames[0] if len(frames) == 1 else b"")
            except zmq.ZMQError:
                return
            except ProtocolError:
                continue
            if not isinstance(message, Bye):
                frame = encode_frame(farewell, session, _LAST_SEQUENCE)
                known = self._accepted.get(identity)
                self._transmit(self._router, identity, frame, *(seal_of(known, frame) if known is not None else []))
