"""TCP connections next to a transfer library, which reports neither that a peer starts to copy nor that it died.

A `Line` is one connection: small frames, and an end that the kernel reports at once if a process dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import select
import selectors
import socket
import threading
import time
from typing import NamedTuple

from baton.errors import ConfigError, TransportError
from baton.transports.process import Contact, own_host_key, process_start_ticks

DIAL_TIMEOUT_S = 5.0
MAX_FRAME = 1 << 16
RECEIVED_BYTES = 1 << 16
MAX_STRANGERS = 64  # lines that have not presented the secret; a further one ends the oldest
BYE = b"bye"  # sent at an orderly close, after the sender's last operation has ended
_WELCOME = b"welcome"
_ACCEPT_PAUSE_S = 0.5  # if no file descriptor is left for a caller
_LENGTH_BYTES = 4


class Event(NamedTuple):
    """A frame of a line, or its end (`frame` is None)."""

    line: Line
    frame: bytes | None


class Line:
    """One connection. `send`, `open`, `abort` and `close` are thread-safe; `receive` is for its lifeline."""

    def __init__(self, sock: socket.socket, admitted: bool) -> None:
        self.socket = sock
        self.admitted = admitted
        self.said_bye = False
        self._inbox = bytearray()
        self._lock = threading.Lock()
        self._closed = False

    def open(self) -> bool:
        """False once the other side's close or death has reached this host."""
        with self._lock:
            if self._closed:
                return False
            poller = select.poll()
            poller.register(self.socket, select.POLLRDHUP)
            return not poller.poll(0)

    def send(self, frame: bytes) -> None:
        """Send at most `MAX_FRAME` bytes, without waiting. Errors show as the end of the line in `wait`."""
        data = memoryview(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        with self._lock, contextlib.suppress(OSError):
            if self._closed:
                return
            try:
                sent = self.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            # The peer has not read a megabyte of frames, which must not be lost: end the line.
            if sent < len(data):
                self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[bytes | None]:
        """Ends with None if the line has ended."""
        frames: list[bytes | None] = []
        try:
            data = self.socket.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return [None]
        self._inbox += data
        while len(self._inbox) >= _LENGTH_BYTES:
            stop = _LENGTH_BYTES + int.from_bytes(self._inbox[:_LENGTH_BYTES], "big")
            if stop > _LENGTH_BYTES + MAX_FRAME:
                return [*frames, None]
            if len(self._inbox) < stop:
                break
            frames.append(bytes(self._inbox[_LENGTH_BYTES:stop]))
            del self._inbox[:stop]
        return frames

    def abort(self) -> None:
        """End a line that breaks the protocol; `wait` reports it."""
        with self._lock, contextlib.suppress(OSError):
            if not self._closed:
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.socket.close()


class Lifeline:
    """`dial` and `wake` are thread-safe; the rest runs on the driver's thread."""

    def __init__(self, host: str) -> None:
        """`host`: a numeric address of this machine. Raises `ConfigError` if listening fails."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
        except OSError as error:
            self._listener.close()
            raise ConfigError("transport", f"cannot listen on host {host!r}: {error}") from error
        self._listener.listen()
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        pid = os.getpid()
        self.contact = Contact(host, port, secrets.token_bytes(16), pid, process_start_ticks(pid), own_host_key())
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # `wake` must not write to a closed descriptor's number
        self._strangers: dict[Line, None] = {}
        self._accept_at: float | None = None  # when to poll the listener again, after descriptors ran out
        self._dialled: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the running `wait`, or the next one."""
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def dial(self, contact: Contact) -> Line:
        """Blocks; raises `TransportError` after `DIAL_TIMEOUT_S`."""
        try:
            sock = socket.create_connection((contact.host, contact.port), DIAL_TIMEOUT_S)
        except (OSError, OverflowError, UnicodeError) as error:
            raise TransportError(f"cannot reach {contact.host}:{contact.port}: {error}") from error
        try:
            sock.sendall(len(contact.secret).to_bytes(_LENGTH_BYTES, "big") + contact.secret)
            want = len(_WELCOME).to_bytes(_LENGTH_BYTES, "big") + _WELCOME
            if sock.recv(len(want), socket.MSG_WAITALL) != want:
                raise TransportError(f"{contact.host}:{contact.port} refused the connection")
        except (OSError, TransportError) as error:
            sock.close()
            raise TransportError(f"no answer from {contact.host}:{contact.port}: {error}") from error
        line = Line(_tuned(sock), admitted=True)
        with self._waking:
            if self._waker < 0:
                line.close()
                raise TransportError("the transport is closed")
            self._dialled.put(line)
        self.wake()
        return line

    def wait(self, timeout_s: float) -> list[Event]:
        """Sleep until something happens, at most `timeout_s`. A line whose end is reported is closed."""
        events = []
        if self._accept_at is not None:
            if time.monotonic() >= self._accept_at:
                self._accept_at = None
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                timeout_s = min(timeout_s, _ACCEPT_PAUSE_S)
        ready = self._selector.select(timeout_s)
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._dialled.get_nowait()
                with contextlib.suppress(ValueError):  # hung up meanwhile
                    self._selector.register(line.socket, selectors.EVENT_READ, line)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            else:
                events += self._read(key.data)
        return events

    def _accept(self) -> None:
        if len(self._strangers) == MAX_STRANGERS:
            self.hang_up(next(iter(self._strangers)))
        try:
            line = Line(_tuned(self._listener.accept()[0]), admitted=False)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                # The listener stays ready: polling it at once would use a core.
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S
            return
        self._strangers[line] = None
        self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> list[Event]:
        events = []
        for frame in line.receive():
            if frame is None:
                self.hang_up(line)
                if line.admitted:
                    events.append(Event(line, None))
                break
            if line.admitted:
                line.said_bye |= frame == BYE
                events.append(Event(line, frame))
            elif secrets.compare_digest(frame, self.contact.secret):
                line.admitted = True
                del self._strangers[line]
                line.send(_WELCOME)
            else:
                self.hang_up(line)
                break
        return events

    def hang_up(self, line: Line) -> None:
        """Idempotent."""
        self._strangers.pop(line, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.close()

    def say_bye(self) -> None:
        """No copy of this side is outstanding."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, Line):
                key.data.send(BYE)

    def close(self) -> None:
        """Idempotent."""
        with self._waking:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1
        with contextlib.suppress(queue.Empty):
            while True:
                self._dialled.get_nowait().close()
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, Line):
                key.data.close()
        self._selector.close()
        self._listener.close()


def _tuned(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A dead host sends nothing: after about 15 s without an answer the kernel ends the line.
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 5),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
