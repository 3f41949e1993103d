"""Mutations of the control channel: its sockets, its peers, and failing calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import zmq

from baton.handoff.protocol.frames import decode_frame
from baton.handoff.protocol.messages import ControlMessage
from baton.handoff.session.base import Connection
from baton.handoff.session.connecting import TransportEnds
from baton.handoff.session.session import Session
from baton.handoff.session.sessions import Sessions
from baton.handoff.session.sockets import Channel
from baton.transports.base import Peer
from simulation.mutations.registry import Patch, mutation

_LISTENERS = ("squatter", "crash_prefill", "crash_decode")


@mutation("who ends each session at a dead engine's address is asked ever more seldom", _LISTENERS)
def _redials_at_once() -> list[Patch]:
    original = Sessions.dial

    def dial(self: Sessions, address: str, lost: Session | None = None) -> Session:
        session = original(self, address, lost)
        if session.redials:
            self._send_hello(session)
        return session

    return [(Sessions, "dial", dial)]


@mutation("who has not proven itself is not taken for alive", ("squatter", "crash_prefill", "late_leg", "slow_engine"))
def _strangers_are_signs_of_life() -> list[Patch]:
    original = Sessions.dial

    def dial(self: Sessions, address: str, lost: Session | None = None) -> Session:
        session = original(self, address, lost)
        session.last_heard = self.clock.monotonic()
        return session

    return [(Sessions, "dial", dial)]


@mutation("what cannot be read is dropped", ("stranger", "squatter", "crash_prefill"))
def _garbage_ends_the_turn() -> list[Patch]:
    def read(self: Channel, ready: Any) -> Iterator[tuple[Connection, ControlMessage]]:
        while True:
            try:
                parts = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            yield from self._accept(parts) if ready is self._router else self._answered(ready, parts)

    return [(Channel, "_read", read)]


@mutation("the identity of a connection is not its session", ("claimed_id", "crash_decode", "crash_prefill"))
def _an_id_is_a_session() -> list[Patch]:
    original = Channel._accept

    def accept(self: Channel, parts: list[Any]) -> list[tuple[Connection, ControlMessage]]:
        known = self._accepted.get(parts[0])
        if known is not None:
            known.session = decode_frame(parts[1])[0]
        return original(self, parts)

    return [(Channel, "_accept", accept)]


@mutation("a socket that is full loses the message, and whoever waits for an answer repeats", ("full_socket",))
def _full_sockets_raise() -> list[Patch]:
    def transmit(self: Channel, sock: Any, identity: bytes | None, *frame: bytes) -> None:
        sock.send_multipart(frame if identity is None else [identity, *frame], zmq.NOBLOCK)

    return [(Channel, "_transmit", transmit)]


@mutation("a frame that cannot be sent for want of memory is lost, and whoever waits repeats", ("no_descriptor",))
def _only_full_sockets_drop() -> list[Patch]:
    def transmit(self: Channel, sock: Any, identity: bytes | None, *frame: bytes) -> None:
        try:
            sock.send_multipart(frame if identity is None else [identity, *frame], zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1

    return [(Channel, "_transmit", transmit)]


@mutation("a frame that cannot be read now is read in a later turn", ("no_descriptor",))
def _reads_never_fail() -> list[Patch]:
    def read(self: Channel, ready: Any) -> Iterator[tuple[Connection, ControlMessage]]:
        while True:
            try:
                parts = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield from self._accept(parts) if ready is self._router else self._answered(ready, parts)

    return [(Channel, "_read", read)]


@mutation("a peer whose memory cannot be opened now is tried again, and ends no thread", ("no_descriptor",))
def _files_always_open() -> list[Patch]:
    def begin(self: TransportEnds, descriptor: bytes) -> Future[Peer]:
        return self._transport.connect(descriptor)

    return [(TransportEnds, "begin", begin)]


@mutation("a call that fails for want of descriptors is made again when there are some", ("no_descriptor",))
def _descriptors_are_always_there() -> list[Patch]:
    original = Channel._socket

    def socket(self: Channel, kind: int) -> Any:
        try:
            return original(self, kind)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error

    return [(Channel, "_socket", socket)]
