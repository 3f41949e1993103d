"""Who may connect to a control socket: CURVE keys, asked for by ZeroMQ through its authentication protocol (ZAP)."""

from __future__ import annotations

import ctypes
import logging
import secrets
from typing import Any

import zmq

from baton.errors import ConfigError
from baton.handoff.channel.keys import Keys
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

# A connection that has not ended its handshake by then is closed; milliseconds.
HANDSHAKE_MS = 5000
# Answered or counted at once.
_BURST = 256
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MONITOR_ADDRESS = "inproc://baton.refused"
# Handshakes that failed before ZAP was asked; `serve` itself counts those that it refuses.
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

# pyzmq's sockets are generic over sync and async; only the plain ones are used here.
Socket = Any


def as_client(sock: Socket, keys: Keys, server: bytes) -> None:
    """Let a socket that has not connected yet dial the listener whose public key is `server` (Z85), and no other."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, server)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def as_server(sock: Socket, keys: Keys) -> None:
    """Let a socket that is not bound yet take only connections whose public key ZAP allows."""
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, b"baton")


def begin_ids_at_random() -> None:
    """A ROUTER numbers connections that bring no id from C's `rand()` on, which nobody seeds. Who claims a number that
    comes next ends the process, by an assertion of ZeroMQ (4.3.5, `add_out_pipe`).
    """
    ctypes.CDLL(None).srand(secrets.randbits(32))


class Gate:
    """Makes one ROUTER let only authorised engines in, and counts whom it refused. For one thread.

    `sockets` must be polled, and `serve` called when one is readable. The ROUTER must not be bound before it is made.
    """

    def __init__(self, context: zmq.Context[Any], router: Socket, keys: Keys) -> None:
        self.refused = 0
        self._keys = keys
        self._router = router
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.monitor(_MONITOR_ADDRESS, _FAILED)
        self._monitor = context.socket(zmq.PAIR)
        # ZeroMQ's own thread writes here, and would wait for a reader that is busy closing.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(_MONITOR_ADDRESS)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        as_server(router, keys)
        self.sockets = (self._monitor, self._zap)

    def serve(self, ready: Socket) -> None:
        """Answer the handshakes that wait, or count those that failed; a flood of them keeps nobody else waiting."""
        for _ in range(_BURST):
            try:
                parts = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if ready is self._monitor:
                self._refuse("a connection was refused: not the handshake of an engine that has the right key")
            else:
                self._answer(parts)

    def _answer(self, parts: list[bytes]) -> None:
        # Version, request id, domain, address, identity, mechanism, and for CURVE the client's public key.
        request, address, key = parts[1], parts[3].decode("ascii", "replace"), parts[-1]
        engine = None
        try:
            if len(parts) == 7 and parts[5] == b"CURVE":
                engine = self._keys.engine_of(key)
        except ConfigError as error:
            log.warning("the keys cannot be read: %s", error)
        if engine is None:
            self._refuse(f"a connection from {address} was refused: public key {key.hex()} is not authorised")
            answer = [b"400", b"unknown key", b""]
        else:
            answer = [b"200", b"OK", engine.encode("ascii")]
        self._zap.send_multipart([b"1.0", request, *answer, b""])

    def _refuse(self, text: str) -> None:
        self.refused += 1
        log.warning(text)

    def close(self) -> None:
        """Close what this made; the ROUTER is the caller's."""
        self._router.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
