"""Engines found by name: each address of a DNS name is an engine, as of a headless Kubernetes Service."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from baton.errors import BatonError, ConfigError
from baton.router.pool import EnginePool
from baton.urls import is_host
from baton.wire import Role

logger = logging.getLogger(__name__)

LOOK_UP_S = 2.0
Resolve = Callable[[str, int], Awaitable[set[str]]]


@dataclass(frozen=True, slots=True)
class Service:
    """A DNS name of engines of one role."""

    role: Role
    host: str
    port: int


def read_services(given: Sequence[str]) -> list[Service]:
    """`ROLE=HOST:PORT` each. Raises `ConfigError`."""
    services = []
    for text in given:
        role, _, address = text.partition("=")
        host, _, port = address.rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if role not in get_args(Role) or not host or not is_host(host) or not is_port:
            raise ConfigError("discover", f"{text!r} is not ROLE=HOST:PORT, such as prefill=baton-prefill:8100")
        services.append(Service(role, host, int(port)))  # type: ignore[arg-type]
    return services


async def resolve(host: str, port: int) -> set[str]:
    """Numeric addresses, IPv6 ones in brackets. Raises `OSError`."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {f"[{info[4][0]}]" if info[0] == socket.AF_INET6 else str(info[4][0]) for info in infos}


class Discovery:
    """Adds an engine to the pool for each new address of a name, and drains it when the name loses the address
    (docs/router.md says when not).
    """

    def __init__(
        self, pool: EnginePool, services: Sequence[Service], look_up: Resolve = resolve, pause_s: float = LOOK_UP_S
    ) -> None:
        self._pool = pool
        self._services = services
        self._look_up, self._pause_s = look_up, pause_s
        self._found: dict[Service, set[str]] = {service: set() for service in services}  # URLs that joined
        # By name or URL, to log each once.
        self._problems: dict[Service, dict[str, str]] = {service: {} for service in services}

    async def resolve_all(self) -> None:
        for service in self._services:
            name = f"{service.host}:{service.port}"
            try:
                addresses = await self._look_up(service.host, service.port)
            except OSError as error:
                self._problem(service, name, f"has no addresses: {error}")
                continue
            await self._change(service, {f"http://{address}:{service.port}" for address in addresses})

    async def run(self) -> None:
        while True:
            try:
                await self.resolve_all()
            except Exception:  # new engines would never be seen
                logger.exception("engines are looked up again")
            await asyncio.sleep(self._pause_s)

    async def _change(self, service: Service, urls: set[str]) -> None:
        listed = {engine.url: engine for engine in self._pool.engines}
        joined, problems = self._found[service], self._problems[service]
        for what in problems.keys() - urls:
            del problems[what]
        for url in sorted(joined - urls):
            if url in listed and not listed[url].leaving:  # a second call would move its requests elsewhere
                self._pool.drain(url)
            joined.discard(url)
        for url in sorted(urls - listed.keys() - joined):
            try:
                await self._pool.add(url, service.role)
            except BatonError as error:
                self._problem(service, url, f"cannot join: {error}")
                continue
            problems.pop(url, None)
            joined.add(url)

    def _problem(self, service: Service, what: str, text: str) -> None:
        if self._problems[service].get(what) != text:
            self._problems[service][what] = text
            logger.warning("%s %s", what, text)
