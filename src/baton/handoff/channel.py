"""Control connections of one engine over ZeroMQ: sockets, sessions, sequence numbers. Knows no attempt.

Each engine binds one ROUTER. An engine that decodes dials the ROUTER of the one that prefills with a
DEALER, and both directions of that pair use this connection. The dialling side draws a random session
number per connection; a frame of another session, or one whose sequence number is not above the last, is
dropped.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from typing import Any

import zmq

from baton.errors import ConfigError, ProtocolError
from baton.handoff.environment import Connection
from baton.handoff.messages import MAX_FRAME, Bye, Hello, Message, decode, encode

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
_BURST = 256
# BYE ends a session whatever the receiver has counted so far.
_LAST_SEQUENCE = (1 << 63) - 1

# pyzmq's sockets are generic over sync and async; only the plain ones are used here.
Socket = Any


class Channel:
    """All connections of one engine. Used by one thread, but for `wake`.

    Raises `ConfigError` when the address cannot be bound.
    """

    def __init__(self, bind: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._router.close()
            self._context.term()
            raise ConfigError("handoff_address", f"cannot bind {bind}: {error}") from error
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._accepted: dict[bytes, Connection] = {}
        self._dialled: dict[Socket, Connection] = {}
        self.malformed = 0
        self.dropped = 0

    def _socket(self, kind: int) -> Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 200)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        return sock

    def wake(self) -> None:
        """Make `receive` return. Any thread; never blocks."""
        with contextlib.suppress(OSError):  # a full pipe wakes as well; a closed one has nobody to wake
            self._wake_in.send(b"\0")

    # ------------------------------------------------------------ connections

    def dial(self, address: str) -> Connection:
        """A new session with the engine at `address`. Connecting goes on in the background.

        Raises `ProtocolError` for an address that ZeroMQ cannot parse.
        """
        sock = self._socket(zmq.DEALER)
        try:
            sock.connect(address)
        except zmq.ZMQError as error:
            sock.close()
            raise ProtocolError(f"cannot dial {address!r}: {error}") from error
        connection = Connection(secrets.randbits(62), sock, address=address)
        self._dialled[sock] = connection
        self._poller.register(sock, zmq.POLLIN)
        return connection

    def drop(self, connection: Connection) -> None:
        """Forget a session; a dialled one is disconnected."""
        if connection.identity is not None:
            if self._accepted.get(connection.identity) is connection:
                del self._accepted[connection.identity]
        elif self._dialled.pop(connection.socket, None) is not None:
            self._poller.unregister(connection.socket)
            connection.socket.close()

    def send(self, connection: Connection, message: Message) -> None:
        """Send without blocking. A full or broken connection drops: whoever waits for an answer repeats.

        Raises `ProtocolError` for a message over its size limit.
        """
        last = isinstance(message, Bye)
        frame = encode(message, connection.session, _LAST_SEQUENCE if last else connection.sent + 1)
        connection.sent += 1
        self._transmit(connection.socket, connection.identity, frame)

    def _transmit(self, sock: Socket, identity: bytes | None, frame: bytes) -> None:
        try:
            sock.send_multipart([frame] if identity is None else [identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1

    # ------------------------------------------------------------ receiving

    def receive(self, timeout_s: float) -> list[tuple[Connection, Message]]:
        """Wait up to `timeout_s` seconds for messages or for `wake`. Malformed frames are only counted."""
        out: list[tuple[Connection, Message]] = []
        for ready, _ in self._poller.poll(max(0, round(timeout_s * 1000))):
            if ready == self._wake_out.fileno():
                self._drain_wake()
                continue
            for _ in range(_BURST):  # one loud peer must not keep the others waiting
                try:
                    parts = ready.recv_multipart(zmq.NOBLOCK)
                except zmq.ZMQError:
                    break
                try:
                    found = self._accept(parts) if ready is self._router else self._answered(ready, parts)
                except ProtocolError as error:
                    self.malformed += 1
                    log.warning("dropped a message: %s", error)
                    continue
                if found is not None:
                    out.append(found)
        return out

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _accept(self, parts: list[bytes]) -> tuple[Connection, Message] | None:
        if len(parts) != 2:
            raise ProtocolError(f"{len(parts)} frame parts where 2 are due")
        identity, frame = parts
        session, sequence, message = decode(frame)
        connection = self._accepted.get(identity)
        if connection is None or connection.session != session:
            if not isinstance(message, Hello):
                if not isinstance(message, Bye):
                    bye = encode(Bye("unknown_session"), session, _LAST_SEQUENCE)
                    self._transmit(self._router, identity, bye)
                return None
            if connection is None and len(self._accepted) >= MAX_SESSIONS:
                raise ProtocolError("too many sessions")
            connection = self._accepted[identity] = Connection(session, self._router, identity)
        return self._in_order(connection, sequence, message)

    def _answered(self, sock: Socket, parts: list[bytes]) -> tuple[Connection, Message] | None:
        connection = self._dialled.get(sock)
        if connection is None:
            return None
        if len(parts) != 1:
            raise ProtocolError(f"{len(parts)} frame parts where 1 is due")
        session, sequence, message = decode(parts[0])
        if session != connection.session:
            return None
        return self._in_order(connection, sequence, message)

    def _in_order(self, connection: Connection, sequence: int, message: Message) -> tuple[Connection, Message] | None:
        if sequence <= connection.received:
            return None
        connection.received = sequence
        return connection, message

    def close(self) -> None:
        """Close all sockets; what was sent gets a moment to leave."""
        for sock in list(self._dialled):
            sock.close()
        self._router.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
