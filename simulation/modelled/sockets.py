"""The ZeroMQ objects of the real channel (a ROUTER, DEALERs and a poller) over the modelled network.

A DEALER has the identity that the ROUTER gave its connection. While descriptors or memory are short, making a socket,
sending and reading raise, and ZeroMQ accepts a connection only later. A full socket raises on send.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from simulation.modelled.network import Network, SimChannel

Parts = list[bytes]


class SimSocket:
    """A DEALER after `connect`, otherwise a ROUTER. Messages wait in `inbox`, with their sender."""

    def __init__(self, network: Network, channel: SimChannel, number: int) -> None:
        self._network, self.channel, self.number = network, channel, number
        self.address = ""
        uid: str = channel.process.uid
        self.identity = b"%s/%d" % (uid.encode(), number)
        self.closed = False
        self.inbox: deque[tuple[SimSocket, Parts]] = deque()
        self.last = self  # the sender of the last message read
        self.peers: dict[bytes, SimSocket] = {}  # of a ROUTER: known senders by identity

    @property
    def gone(self) -> bool:
        """Closed, or its process is dead."""
        return self.closed or self.channel.process.dead

    def setsockopt(self, option: int, value: object) -> None:
        """Ignored: keys, limits and intervals are not modelled."""

    def connect(self, endpoint: str) -> None:
        """The socket may get the identity of a closed connection to that address."""
        self.address = endpoint
        self.identity = self._network.identity_for(self)

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def send_multipart(self, parts: Parts | tuple[bytes, ...], flags: int = 0) -> None:
        """Raises `zmq.Again` if it is full, `zmq.ZMQError` while memory is short."""
        if self.channel.world.hit("full_socket"):
            raise zmq.Again
        if self.channel.world.short():
            raise zmq.ZMQError(errno.ENOBUFS)
        if self.address:
            self._network.to_address(self, list(parts))
            return
        identity, *rest = parts
        if (dealer := self.peers.get(identity)) is not None:  # a ROUTER drops messages for unknown identities
            self._network.to_dialler(self.channel.process, dealer, rest)

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> Parts:
        """Raises `zmq.Again` if nothing waits, `zmq.ZMQError` while memory is short."""
        if not self.inbox:
            raise zmq.Again
        if self.channel.world.short():
            self.channel.process.wake()  # the message is still there
            raise zmq.ZMQError(errno.ENOMEM)
        self.last, parts = self.inbox.popleft()
        return parts


class SimContext:
    def __init__(self, network: Network, channel: SimChannel) -> None:
        self._network, self._channel = network, channel

    def socket(self, kind: int) -> SimSocket:
        """Raises `zmq.ZMQError` while descriptors are short."""
        if kind == zmq.DEALER and self._channel.world.hit("no_descriptor"):
            raise zmq.ZMQError(errno.EMFILE)
        return self._network.socket(self._channel)


class SimPoller:
    def __init__(self) -> None:
        self._sockets: dict[SimSocket, None] = {}

    def register(self, sock: SimSocket, flags: int = 0) -> None:
        self._sockets[sock] = None

    def unregister(self, sock: SimSocket) -> None:
        del self._sockets[sock]

    def poll(self, timeout_ms: int = 0) -> list[tuple[Any, int]]:
        """Never waits: virtual time does."""
        return [(sock, zmq.POLLIN) for sock in self._sockets if sock.inbox]

    @property
    def readable(self) -> bool:
        return any(sock.inbox for sock in self._sockets)

    def unread(self) -> Iterator[Parts]:
        for sock in self._sockets:
            for _, parts in sock.inbox:
                yield parts
