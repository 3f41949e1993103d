"""For each address of a DNS name a router has an engine, which joins and leaves with the address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from baton.errors import ConfigError, RequestError
from baton.openai.http.app import beside
from baton.router import RouterConfig, build_app
from baton.router.discovery import Discovery, Service, read_services, resolve
from baton.router.pool import EnginePool
from testkit.servers.fake_serving import ADMIN, ADMIN_TOKEN, KEY, served, status_of
from testkit.servers.fleets import QUICK, Setup, complete, engines


class Names:
    """A name server: the addresses of each name, or none."""

    def __init__(self) -> None:
        self.addresses: dict[str, set[str]] = {}

    async def __call__(self, host: str, port: int) -> set[str]:
        if not self.addresses.get(host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


async def test_engines_come_and_go_with_their_addresses(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names, setup, looks = Names(), Setup(directory), list[Discovery]()
    made = Discovery.__init__

    def init(self: Discovery, pool: EnginePool, services: Sequence[Service]) -> None:
        looks.append(self)
        made(self, pool, services, names)

    monkeypatch.setattr(Discovery, "__init__", init)
    async with engines(directory, setup.prefill, setup.decode) as (p, d), aiohttp.ClientSession() as session:
        ports = [url.rpartition(":")[2] for url in (p, d)]
        named = (f"prefill=p:{ports[0]}", f"decode=d:{ports[1]}", "decode=nobody:1")
        config = RouterConfig(discover=named, ticket_key=KEY, timers=QUICK, admin_token=ADMIN_TOKEN)
        async with served(await build_app(config)) as url:

            async def listed(**addresses: str) -> list[str]:
                names.addresses = {name: {address} for name, address in addresses.items() if address}
                await looks[0].resolve_all()
                return [engine["url"] for engine in (await status_of(session, url))["engines"]]

            assert await listed() == []
            assert await listed(p="127.0.0.1", d="127.0.0.1") == [p, d]
            assert (await complete(session, url))[0] == 200
            assert await listed(p="127.0.0.1") == [p, d], "a name server that is silent drains none"
            assert await listed(p="127.0.0.1", d="127.0.0.9") == [p, f"http://127.0.0.9:{ports[1]}"]
            assert await listed(p="127.0.0.1", d="127.0.0.1") == [p, d]
            for how in ("remove", "drain"):
                async with session.post(f"{url}/instances/{how}", json={"url": d}, headers=ADMIN) as response:
                    assert response.status == 200
                assert await listed(p="127.0.0.1", d="127.0.0.1") == [p], "what an operator removes stays away"
                elsewhere = f"http://127.0.0.9:{ports[1]}"
                assert await listed(p="127.0.0.1", d="127.0.0.9") == [p, elsewhere]
                assert await listed(p="127.0.0.1", d="127.0.0.1") == [p, d], "until its address comes anew"
    lines = [record.message for record in caplog.records if "nobody:1" in record.message]
    assert len(lines) == 1, "a name without addresses is told once"


async def test_an_address_that_cannot_join_is_told_again_after_it_was_away(caplog: pytest.LogCaptureFixture) -> None:
    """Addresses that are gone are forgotten."""

    async def add(url: str, role: str) -> None:
        raise RequestError("it serves another model")

    names, pool = Names(), cast(Any, SimpleNamespace(engines=[], add=add))
    discovery = Discovery(pool, [Service("decode", "d", 81)], names)
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"):
        names.addresses = {"d": {address}}
        await discovery.resolve_all()
    assert sum("10.0.0.1" in record.message for record in caplog.records) == 2


def test_services_are_checked() -> None:
    assert read_services(["decode=d.ns:81", "both=e:82"]) == [Service("decode", "d.ns", 81), Service("both", "e", 82)]


@pytest.mark.parametrize(
    "bad", ["d:81", "decode=d", "draft=d:81", "decode=d:0", "decode=:1", "decode=d:x", "decode=d..e:81"]
)
def test_a_service_without_role_host_or_port_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="discover"):
        read_services([bad])


async def test_no_error_ends_discovery() -> None:
    num_asked, again = 0, asyncio.Event()

    async def look_up(host: str, port: int) -> set[str]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise ValueError("not foreseen")
        again.set()
        return set()

    pool: Any = SimpleNamespace(engines=[])
    discovery = Discovery(pool, [Service("both", "e", 82)], look_up, pause_s=0.0)
    running = beside(discovery.run)(web.Application())
    await anext(running)
    await asyncio.wait_for(again.wait(), 60)
    with pytest.raises(StopAsyncIteration):
        await anext(running)


async def test_addresses_of_a_name() -> None:
    assert await resolve("127.0.0.3", 80) == {"127.0.0.3"}
    assert await resolve("::1", 80) == {"[::1]"}
