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

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit(1))

_PAUSE_S = 0.1
_OWN_FILES = 64  # open files of the process itself
# A handed-off request needs its client's connection and two to engines.
_FILES_PER_CLIENT = 3


def max_connections(limits: HttpLimits) -> int:
    """At most `HttpLimits.connections`, less if the limit on open files requires it."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return max(1, min(limits.connections, (files - _OWN_FILES) // _FILES_PER_CLIENT))


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
        self._opening: dict[asyncio.Task[None], None] = {}
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Open connections stay. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # the client has left
            except OSError as error:  # no file descriptor or memory is left
                logger.warning("no connection can be taken now: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                while not self._has_room():
                    logger.warning("all %d connections are busy: others wait", self._limit)
                    await asyncio.sleep(_PAUSE_S)
            except asyncio.CancelledError:
                client.close()
                raise
            task = asyncio.create_task(self._open(client))
            self._opening[task] = None
            task.add_done_callback(self._opening.pop)
            await asyncio.sleep(0)  # sock_accept does not yield while connections are pending

    async def _open(self, client: socket.socket) -> None:
        try:
            if self._tls is None:
                await asyncio.get_running_loop().connect_accepted_socket(self._new_connection, client)
            else:
                await tls.connect(client, self._new_connection(), self._tls, self._limits)
        except (OSError, EOFError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            client.close()
            logger.debug("a connection could not be opened: %s", error)
        except asyncio.CancelledError:
            client.close()
            raise

    def _has_room(self) -> bool:
        """Whether another connection fits, perhaps after closing an idle one."""
        connections = self._server.connections
        # Without TLS, opening connections would be counted twice.
        num_opening = 0 if self._tls is None else len(self._opening)
        if len(connections) + num_opening < self._limit:
            return True
        ours = [one for one in connections if isinstance(one, ClientConnection)]
        closing, idle = [one for one in ours if one.is_closing()], [one for one in ours if one.is_idle()]
        if closing or idle:
            [*closing, *(one for one in idle if not one.has_asked), *idle][0].leave()
        elif num_opening:
            next(iter(self._opening)).cancel()
        else:
            return False
        return True
