"""A whole check-up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from baton.doctor.ask import ask_server, read_clock
from baton.doctor.checkup import Checkup, Finding, Problem, RouterFacts, Server, Trial
from baton.doctor.host import check_host, read_host
from baton.doctor.key_checks import check_keys
from baton.doctor.pairs import check_pairs
from baton.doctor.routers import check_router
from baton.doctor.servers import check_servers
from baton.doctor.trial import try_handoff
from baton.errors import BatonError
from baton.openai.answers import printable_line

CLOCK_S = 1.0


async def check_up(
    urls: Sequence[str],
    router_url: str | None = None,
    keys: str | None = None,
    timeout_s: float = 10.0,
    api_key: str | None = None,
    clock_s: float = CLOCK_S,
) -> Checkup:
    """Ask the servers at base URLs, and a router with its engines, which may be among `urls` too. A handoff is tried
    if the router has engines of both roles."""
    began = time.monotonic()
    answers = await asyncio.gather(
        *(ask_server(url, timeout_s, api_key) for url in [*urls, *filter(None, [router_url])])
    )
    routers = [one for one in answers if isinstance(one, RouterFacts)]
    servers = [one for one in answers if isinstance(one, Server)]
    router = routers[0] if routers else None
    if router_url is not None and not isinstance(answers[-1], RouterFacts):
        last = servers.pop()
        why = Problem("not_a_router", f"a {last.kind} server answers") if last.problem is None else last.problem
        router = RouterFacts(url=router_url, problem=why)
    if router is not None and router.problem is None:
        known = {server.url for server in servers}
        ids = {server.identity.engine_id for server in servers if server.identity is not None}
        more = [engine.url for engine in router.engines if engine.url not in known and engine.engine_id not in ids]
        others = await asyncio.gather(*(ask_server(url, timeout_s, api_key) for url in more))
        servers += [one for one in others if isinstance(one, Server)]
    trial = await _trial(router, servers, timeout_s, api_key)
    await asyncio.sleep(max(0.0, clock_s - (time.monotonic() - began)))
    servers = list(await asyncio.gather(*(_read_again(server, timeout_s, api_key) for server in servers)))
    return Checkup(
        servers=tuple(servers),
        router=router,
        host=read_host(),
        trial=trial,
        key_findings=() if keys is None else tuple(check_keys(keys, servers)),
    )


def findings_of(checkup: Checkup) -> list[Finding]:
    findings = [
        *check_servers(checkup.servers),
        *check_pairs(checkup.servers),
        *checkup.key_findings,
        *check_host(checkup),
        *check_router(checkup),
    ]
    return list(dict.fromkeys(findings))


async def _trial(
    router: RouterFacts | None, servers: Sequence[Server], timeout_s: float, api_key: str | None
) -> Trial | None:
    if router is None or router.problem is not None or not router.ready:
        return None
    if not {"prefill", "decode"} <= {engine.role for engine in router.engines}:
        return None
    lengths = [server.max_model_len for server in servers if server.max_model_len is not None]
    try:
        return await try_handoff(router.url, min(lengths, default=None), timeout_s, api_key)
    except BatonError as error:
        return Trial(problem=printable_line(str(error)))


async def _read_again(server: Server, timeout_s: float, api_key: str | None) -> Server:
    reading = await read_clock(server, timeout_s, api_key)
    return server if reading is None else dataclasses.replace(server, clocks=(*server.clocks, reading))
