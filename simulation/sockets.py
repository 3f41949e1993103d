"""ZeroMQ as the real channel sees it: a ROUTER, DEALERs that dial it, and a poller, over the modelled network.

A DEALER has the identity that the ROUTER gave its connection. Sockets cannot be made while descriptors are short, and
a full one takes nothing.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from simulation.network import Network, SimChannel

Parts = list[bytes]


class SimSocket:
    """A DEALER once it has connected, until then and without that a ROUTER. Messages wait in its `inbox`, with who sent
    them.
    """

    def __init__(self, network: Network, channel: SimChannel, number: int) -> None:
        self._network, self.channel, self.number = network, channel, number
        self.address = ""
        uid: str = channel.process.uid
        self.identity = b"%s/%d" % (uid.encode(), number)
        self.closed = False
        self.inbox: deque[tuple[SimSocket, Parts]] = deque()
        self.last = self  # whose message was read last
        self.peers: dict[bytes, SimSocket] = {}  # of a ROUTER: whom it hears, by identity

    @property
    def gone(self) -> bool:
        """Nobody reads or writes it any more."""
        return self.closed or self.channel.process.dead

    def setsockopt(self, option: int, value: object) -> None:
        """Keys, limits and intervals: nothing of them is modelled."""

    def connect(self, endpoint: str) -> None:
        """It may be given the identity of a connection to that address that is over."""
        self.address = endpoint
        self.identity = self._network.identity_for(self)

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def send_multipart(self, parts: Parts | tuple[bytes, ...], flags: int = 0) -> None:
        """Raises `zmq.Again` where it is full."""
        if self.channel.world.hit("full_socket"):
            raise zmq.Again
        if self.address:
            self._network.to_address(self, list(parts))
            return
        identity, *rest = parts
        if (dealer := self.peers.get(identity)) is not None:  # a ROUTER drops what is for nobody
            self._network.to_dialler(self.channel.process, dealer, rest)

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> Parts:
        """Raises `zmq.Again` where nothing waits."""
        if not self.inbox:
            raise zmq.Again
        self.last, parts = self.inbox.popleft()
        return parts


class SimContext:
    """Makes one channel's sockets."""

    def __init__(self, network: Network, channel: SimChannel) -> None:
        self._network, self._channel = network, channel

    def socket(self, kind: int) -> SimSocket:
        """Raises `zmq.ZMQError` while descriptors are short."""
        if kind == zmq.DEALER and self._channel.world.hit("no_descriptor"):
            raise zmq.ZMQError(errno.EMFILE)
        return self._network.socket(self._channel)


class SimPoller:
    """Knows which sockets have something to read."""

    def __init__(self) -> None:
        self._sockets: dict[SimSocket, None] = {}

    def register(self, sock: SimSocket, flags: int = 0) -> None:
        self._sockets[sock] = None

    def unregister(self, sock: SimSocket) -> None:
        del self._sockets[sock]

    def poll(self, timeout_ms: int = 0) -> list[tuple[Any, int]]:
        """It never waits: the world does."""
        return [(sock, zmq.POLLIN) for sock in self._sockets if sock.inbox]

    @property
    def readable(self) -> bool:
        """Whether something waits anywhere."""
        return any(sock.inbox for sock in self._sockets)
