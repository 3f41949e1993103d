"""Whether dialled sockets are admitted."""

from __future__ import annotations

import contextlib
from typing import Any

import zmq

from baton.handoff.session.base import Connection, NoSession, unanswered
from baton.handoff.session.curve import Socket


class DialMonitors:
    """A monitor of each dialled socket, until its first frame. Not thread-safe."""

    def __init__(self, context: zmq.Context[Any], poller: zmq.Poller) -> None:
        self._context, self._poller = context, poller
        self._monitors: dict[Socket, Socket] = {}
        self._connections: dict[Socket, Connection] = {}  # by monitor

    def __contains__(self, ready: object) -> bool:
        return ready in self._connections

    def add(self, sock: Socket, connection: Connection) -> None:
        """Before the socket connects. Raises `zmq.ZMQError`."""
        address = f"inproc://baton.dialled.{connection.session}"
        sock.monitor(address, zmq.EVENT_CONNECT_RETRIED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # as `Gate`
        monitor.connect(address)
        self._monitors[sock], self._connections[monitor] = monitor, connection
        self._poller.register(monitor, zmq.POLLIN)

    def failed(self, ready: Socket) -> tuple[Connection, NoSession]:
        with contextlib.suppress(zmq.ZMQError):
            while True:
                ready.recv_multipart(zmq.NOBLOCK)
        connection = self._connections[ready]
        return connection, unanswered(connection.address)

    def remove(self, sock: Socket) -> None:
        if (monitor := self._monitors.pop(sock, None)) is not None:
            del self._connections[monitor]
            self._poller.unregister(monitor)
            sock.disable_monitor()
            monitor.close(0)
