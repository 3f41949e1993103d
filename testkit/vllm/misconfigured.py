"""`python -m testkit.vllm.misconfigured`: `baton doctor` over real vLLM servers that are wrong in one or more ways, and
over a healthy pair that is asked or routed wrongly (`testkit.vllm.planted`). Needs vLLM's environment
(`tools/install_vllm.py`).

Prints what the doctor says, and a table of what was planted and found. The status is 1 unless each fault is found by
its name, nothing else is found, and the healthy pair is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from baton.doctor.diagnose import check_up, findings_of
from baton.doctor.report import format_checkup
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import ticket_key_file
from baton.router import RouterConfig, build_app
from benchmarks.vllm.servers import free_port, serve
from testkit.servers.fake_serving import await_engines, served
from testkit.vllm.planted import ENGINES, Asked, Wrong, wrong_servers, wrongly_asked
from testkit.vllm.quiet import small_servers
from testkit.vllm.servers import MODEL


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was planted (fault -> name; none: a healthy pair), and the names of findings. `follows` as in `Wrong`."""

    faults: Mapping[str, str]
    names: frozenset[str]
    follows: tuple[str, ...] = ()

    @property
    def others(self) -> list[str]:
        """Findings of nothing that was planted."""
        return sorted(
            name for name in self.names if name not in self.faults.values() and not name.startswith(self.follows)
        )

    def rows(self) -> Iterator[tuple[bool, str]]:
        """Whether each fault was found, and the table's row of it. A healthy pair is right if nothing was found."""
        others = ", ".join(self.others)
        for fault, name in (self.faults or {"nothing": ""}).items():
            right = (not name or name in self.names) and not others
            told = "yes" if name in self.names else "no" if name else "ready" if not others else "not ready"
            yield right, f"| {fault} | {name and f'`{name}`'} | {told} | {others} |"


class _Check:
    """`at_once`: how many wrong servers run at a time, beside P and D."""

    def __init__(self, folder: Path, at_once: int) -> None:
        self._folder, self._at_once = folder, at_once
        self._keys = str(folder / "keys")
        self._ports = [free_port(), free_port()]
        self._p, self._d = (f"http://127.0.0.1:{port}" for port in self._ports)

    def run(self) -> list[Outcome]:
        """Start all servers, and ask."""
        wrong = wrong_servers(self._folder)
        names, outcomes = [*wrong], list[Outcome]()
        healthy = Wrong({}), Wrong({}, transfer={"kv_role": "kv_producer", "engine_id": "P"})
        named = zip(healthy, ENGINES[::-1], self._ports[::-1], strict=True)
        both = [one.config(name, self._folder, port) for one, name, port in named]
        with serve(sys.executable, str(MODEL), self._folder, both):
            outcomes += asyncio.run(self._around_a_healthy_pair())
            for start in range(0, len(names), self._at_once):
                outcomes += self._beside_p({name: wrong[name] for name in names[start : start + self._at_once]})
        return outcomes

    def _beside_p(self, wrong: Mapping[str, Wrong]) -> Iterator[Outcome]:
        ports = {name: free_port() for name in wrong}
        configs = [one.config(f"D {name}", self._folder, ports[name]) for name, one in wrong.items()]
        with serve(sys.executable, str(MODEL), self._folder, configs):
            for name, one in wrong.items():
                asked = Asked("", [self._p, f"http://127.0.0.1:{ports[name]}"], router={} if one.routed else None)
                yield Outcome(one.faults, asyncio.run(self._ask(name, asked)), one.follows)

    async def _around_a_healthy_pair(self) -> list[Outcome]:
        async def welcome(request: web.Request) -> web.Response:
            return web.Response(text="<html>welcome</html>", content_type="text/html")

        app = web.Application()
        app.router.add_get("/{any:.*}", welcome)
        async with served(app) as page:
            cases = wrongly_asked(self._p, self._d, page, self._folder)
            return [
                Outcome({what: case.found} if case.found else {}, await self._ask(what, case))
                for what, case in cases.items()
            ]

    async def _ask(self, what: str, case: Asked) -> frozenset[str]:
        """The names that the doctor finds; prints what it says."""
        urls = [self._p, self._d] if case.urls is None else case.urls
        async with contextlib.AsyncExitStack() as stack:
            router = None
            if case.router is not None:
                key = load_or_create_key(ticket_key_file(self._keys))
                config = RouterConfig(prefill=(urls[0],), decode=(urls[1],), ticket_key=key, engine="vllm")
                app = await build_app(dataclasses.replace(config, **case.router))
                router = await stack.enter_async_context(served(app))
                session = await stack.enter_async_context(aiohttp.ClientSession())
                await await_engines(session, router)
            checkup = await check_up(urls, router, case.keys or self._keys, timeout_s=60.0, clock_s=0.0)
        found = findings_of(checkup)
        print(f"--- {what}\n{format_checkup(checkup, found)}", flush=True)
        return frozenset(finding.name for finding in found)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=4, help="wrong servers, 1.3 GB each")
    arguments, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-planted-") as directory, small_servers(Path(directory) / "quiet"):
        rows = [row for outcome in _Check(Path(directory), arguments.at_once).run() for row in outcome.rows()]
    print("| planted | name | found | other findings |\n|---|---|---|---|")
    print("\n".join(text for _, text in rows))
    right = sum(found for found, _ in rows)
    print(f"{right} of {len(rows)} right, {time.monotonic() - began:.0f} s")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
