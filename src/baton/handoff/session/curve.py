"""Admission to a control socket by CURVE keys, through ZeroMQ's ZAP."""

from __future__ import annotations

import errno
import logging
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from baton.errors import ConfigError
from baton.handoff.session.keys import Keys
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

# Limit of a connection's handshake, in milliseconds.
HANDSHAKE_MS = 5000
# Handshakes per call.
_BURST = 256
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MONITOR_ADDRESS = "inproc://baton.refused"
# Handshakes that failed before ZAP was asked.
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

Socket = Any


def as_client(sock: Socket, keys: Keys, server: bytes) -> None:
    """`server`: its public key (Z85)."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, server)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def as_server(sock: Socket, keys: Keys) -> None:
    """ZAP decides which public keys an unbound socket accepts."""
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, b"baton")


class Gate:
    """Admits only authorised engines to one ROUTER. Not thread-safe.

    Poll `sockets`, and call `serve` when one is readable. Create the gate before binding the ROUTER.
    """

    def __init__(self, context: zmq.Context[Any], router: Socket, keys: Keys) -> None:
        self.refused = 0
        self._keys = keys
        self._router = router
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.monitor(_MONITOR_ADDRESS, _FAILED)
        self._monitor = context.socket(zmq.PAIR)
        # ZeroMQ's own thread would block on a slow reader.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(_MONITOR_ADDRESS)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        as_server(router, keys)
        self.sockets = (self._monitor, self._zap)

    def serve(self, ready: Socket) -> None:
        """Serves a bounded number, so a flood of handshakes delays nobody else."""
        for _ in range(_BURST):
            try:
                parts = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if ready is self._monitor:
                self._failed(parts)
            else:
                self._answer(parts)

    def _failed(self, parts: list[bytes]) -> None:
        # A port check resets it (`doctor.ask`).
        failure = parse_monitor_message(parts)
        if failure["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or failure["value"] != errno.ECONNRESET:
            self._refuse("a connection was refused: a port check that closed it, or an engine with another key")

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
        self._router.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
