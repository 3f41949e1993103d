"""Accepts client connections within the limit on open files. asyncio's server accepts until no descriptor is left, then
logs thousands of tracebacks per second."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from baton.log_limit import LogLimit
from baton.openai.http import tls
from baton.openai.http.connections import ClientConnection
from baton.openai.http.limits import HttpLimits
from baton.openai.http.turns import READ_BYTES, ShortTurns

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit(1))

_PAUSE_S = 0.1
_OWN_FILES = 64  # open files of the process itself
# A handed-off request needs its client's connection and two to engines.
_FILES_PER_CLIENT = 3
_FEWEST = 8


def max_connections(limits: HttpLimits) -> int:
    """At most `HttpLimits.connections`, less if the limit on open files requires it."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, max(_FEWEST, (files - _OWN_FILES) // _FILES_PER_CLIENT))


class Acceptor:
    """At the limit, each new connection closes an idle one, first those that never sent a request. If all are busy, it
    waits."""

    def __init__(
        self,
        server: web.Server,
        listener: socket.socket,
        new_connection: Callable[[], ClientConnection],
        context: ssl.SSLContext | None,
        limits: HttpLimits,
    ) -> None:
        self._server, self._listener, self._new_connection = server, listener, new_connection
        self._tls, self._limits = context, limits
        self._limit = max_connections(limits)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._opening: dict[asyncio.Task[None], ClientConnection] = {}
        self._held: socket.socket | None = None  # waits for room
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Open connections stay. Idempotent."""
        if self._listener.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        if self._held is not None:
            self._held.close()
        for task in self._opening:
            task.cancel()
        self._listener.close()

    def _accept(self) -> None:
        try:
            client = self._held or self._listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has left
        except OSError as error:  # no file descriptor or memory is left
            logger.warning("no connection can be taken now: %s", error)
            self._wait()
            return
        client.setblocking(False)
        if not self._has_room():
            logger.warning("all %d connections are busy: others wait", self._limit)
            self._held = client
            self._wait()
            return
        self._held = None
        connection = self._new_connection()
        task = self._loop.create_task(self._open(client, connection))
        self._opening[task] = connection
        task.add_done_callback(self._opening.pop)

    def _wait(self) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)
        if self._held is not None:
            self._accept()

    async def _open(self, client: socket.socket, connection: ClientConnection) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: ShortTurns(connection, self._buffer), client)
            else:
                await tls.connect(client, connection, self._tls, self._limits)
        except (OSError, EOFError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            client.close()
            logger.debug("a connection could not be opened: %s", error)
        except asyncio.CancelledError:
            client.close()
            raise

    def _has_room(self) -> bool:
        """Whether another connection fits, perhaps after closing an idle one."""
        opening = [task for task, connection in self._opening.items() if not connection.is_made]
        connections = self._server.connections
        num = len(connections) + len(opening)
        if num < self._limit:
            return True
        ours = [one for one in connections if isinstance(one, ClientConnection)]
        closing = [one for one in ours if one.is_closing()]
        for one in closing:
            one.leave()
        if num - len(closing) < self._limit:
            return True
        idle = [one for one in ours if one.is_idle() and not one.is_closing()]
        if idle:
            [*(one for one in idle if not one.has_asked), *idle][0].leave()
        elif opening:
            opening[0].cancel()
        else:
            return False
        return True
