"""Whether dialled sockets are admitted."""

from __future__ import annotations

import contextlib
from typing import Any

import zmq

from baton.handoff.session.base import Connection, NoSession
from baton.handoff.session.curve import Socket


class DialMonitors:
    """Of each socket, until its first frame. Not thread-safe."""

    def __init__(self, context: zmq.Context[Any], poller: zmq.Poller) -> None:
        self._context, self._poller = context, poller
        self._monitors: dict[Socket, Socket] = {}
        self._dialled: dict[Socket, tuple[Socket, Connection]] = {}  # by monitor

    def __contains__(self, ready: object) -> bool:
        return ready in self._dialled

    def add(self, sock: Socket, connection: Connection) -> None:
        """Before the socket connects. Raises `zmq.ZMQError`."""
        address = f"inproc://baton.dialled.{connection.session}"
        sock.monitor(address, zmq.EVENT_CONNECT_RETRIED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # as `Gate`
        monitor.connect(address)
        self._monitors[sock], self._dialled[monitor] = monitor, (sock, connection)
        self._poller.register(monitor, zmq.POLLIN)

    def failed(self, ready: Socket) -> tuple[Connection, NoSession]:
        with contextlib.suppress(zmq.ZMQError):
            while True:
                ready.recv_multipart(zmq.NOBLOCK)
        _, connection = self._dialled[ready]
        address = connection.address
        text = f"no answer from {address}: nobody is there, or it has another ticket key, or not these keys"
        return connection, NoSession("unreachable_peer", text)

    def remove(self, sock: Socket) -> None:
        if (monitor := self._monitors.pop(sock, None)) is not None:
            del self._dialled[monitor]
            self._poller.unregister(monitor)
            sock.disable_monitor()
            monitor.close(0)
