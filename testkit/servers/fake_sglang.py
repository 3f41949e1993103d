"""Fake SGLang servers with Baton's plug-in, one for prefill and one for decode, and a router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from baton.event_loop import timeout
from baton.handoff.protocol import ticket as tickets
from baton.router import RouterConfig, build_app
from baton.sampling_params import SamplingParams
from baton.wire import Role, SglangIdentity
from testkit.servers.fake_serving import KEY, await_engines, served
from testkit.servers.fake_vllm import EOS, token_at
from testkit.servers.fleets import QUICK


@dataclass
class FakeSglang:
    """`rooms`: prefill legs that have ended, shared by both. `dies`: its connections are cut in the next leg, after one
    token. `traces`: the `traceparent` of each leg."""

    root: Path
    role: Role
    rooms: dict[int, asyncio.Event]
    dies: bool = False
    traces: list[str | None] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/health", self._loads)
        app.router.add_post("/generate", self._generate)
        return app

    async def _info(self, request: web.Request) -> web.Response:
        name = "P" if self.role == "prefill" else "D"
        identity = SglangIdentity(
            engine_id=name,
            incarnation=f"{name}-1",
            control_addresses=["tcp://127.0.0.1:1"],
            fingerprint="{}",
            vocab_size=258,
            eos_token_ids=[EOS],
            num_speculative_tokens=0,
            clock=time.monotonic(),
            role=self.role,
            max_model_len=512,
        )
        state = {"baton": msgspec.to_builtins(identity)}
        return web.json_response({"model_path": str(self.root), "internal_states": [state]})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": []})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.traces.append(request.headers.get("traceparent"))
        digest = tickets.request_digest(body["input_ids"], SamplingParams())
        role = "prefill" if self.role == "prefill" else "decode"
        assert tickets.verify_ticket(KEY, body["bootstrap_host"], role, time.monotonic()).request_digest == digest
        room = self.rooms.setdefault(body["bootstrap_room"], asyncio.Event())
        if role == "prefill":
            room.set()
        async with timeout(5.0):
            await room.wait()
        response = web.StreamResponse()
        await response.prepare(request)
        start, count = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"] if role == "decode" else 1
        for number in range(1, count + 1):
            if self.dies and number > 1:
                self.dies = False
                assert request.transport is not None
                request.transport.abort()
                return response
            meta: dict[str, Any] = {"completion_tokens": number, "finish_reason": None}
            if number == count:
                meta["finish_reason"] = {"type": "length", "length": count}
                meta |= {"queue_time": 1e-4, "forward_entry_time": 1e9, "prefill_finished_time": 1e9 + 2e-4}
            ids = [token_at(position) for position in range(start, start + number)]
            await response.write(b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response


class SglangPair:
    def __init__(self, directory: Path) -> None:
        rooms: dict[int, asyncio.Event] = {}
        self.p, self.d = FakeSglang(directory, "prefill", rooms), FakeSglang(directory, "decode", rooms)

    @contextlib.asynccontextmanager
    async def run(self, **config: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
        async with contextlib.AsyncExitStack() as stack:
            p, d = [await stack.enter_async_context(served(server.app())) for server in (self.p, self.d)]
            settings = {"engine": "sglang", "ticket_key": KEY, "timers": QUICK, **config}
            app = await build_app(RouterConfig(prefill=(p,), decode=(d,), **settings))
            url = await stack.enter_async_context(served(app))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await await_engines(session, url)
            yield url, session
