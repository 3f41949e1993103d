"""A router over a fake vLLM prefill and decode server."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from baton.router import RouterConfig, build_app
from testkit.servers import fake_serving
from testkit.servers.fake_serving import ADMIN_TOKEN, KEY, await_engines, served
from testkit.servers.fake_vllm import FakeVllm, Kind, Shared, token_at
from testkit.servers.fleets import QUICK

CONNECTORS: dict[str, Kind] = {"BatonConnector": "baton", "NixlConnector": "pull", "NixlPushConnector": "push"}
WAYS = [(name, False) for name in CONNECTORS] + [("BatonConnector", True)]
PROMPT = [10, 11, 12, 13, 14]
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1, "return_token_ids": True}


class Pair:
    def __init__(self, directory: Path, name: str = "BatonConnector", seed: bool = False, **both: Any) -> None:
        shared = Shared()
        self.name, self.seed = name, seed
        self.p, self.d = (
            FakeVllm(directory, name=name_, kind=CONNECTORS[name], shared=shared, **both) for name_ in ("P", "D")
        )

    @contextlib.asynccontextmanager
    async def run(self, **config: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
        async with contextlib.AsyncExitStack() as stack:
            self.urls = [await stack.enter_async_context(server.serve()) for server in (self.p, self.d)]
            ranks = ("#dp_rank=0", "#dp_rank=1") if self.d.has_ranks else ("",)
            settings = RouterConfig(
                prefill=(self.urls[0],),
                decode=tuple(self.urls[1] + rank for rank in ranks),
                engine="vllm",
                kv_connector=self.name,
                seed_first_token=self.seed,
                **{"ticket_key": KEY, "admin_token": ADMIN_TOKEN, "timers": QUICK, **config},
            )
            url = await stack.enter_async_context(served(await build_app(settings)))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await await_engines(session, url)
            yield url, session

    def legs(self) -> list[list[str]]:
        """Roles of the requests that each server got, without identity requests."""
        return [[r for r in map(s._role, s.asked) if r != "identify"] for s in (self.p, self.d)]


complete = functools.partial(fake_serving.complete, **BODY)


def said(num: int, start: int = len(PROMPT)) -> list[int]:
    return [token_at(position) for position in range(start, start + num)]
