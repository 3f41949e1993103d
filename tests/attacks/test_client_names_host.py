"""A client that tries to choose the source or destination of KV."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig
from baton.handoff.protocol.ticket import Ticket, load_or_create_key, request_digest, sign_ticket
from baton.router import RouterConfig, build_app
from baton.sampling_params import SamplingParams
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.checkpoints.common import make_checkpoint
from testkit.servers.fake_serving import KEY, FakeEngine, served, write_tokenizer

EVIL = {"host": "10.0.0.1", "port": 4444}
FIELDS: list[dict[str, Any]] = [
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 4444}},
    {"kv_transfer_params": {"baton": {"role": "decode", "ticket": "x"}}},
    {"kv_transfer_params": {}},
    {"kv_transfer_params": []},
    {"kv_transfer_params": [[["x"]]]},
    {"kv_transfer_params": False},
    {"kv_transfer_params": 0},
    {"kv_transfer_params": ""},
    {"kv_transfer_params": "x" * 2**19},
    {"kv_transfer_params": {str(i): i for i in range(20000)}},
    {"kv_transfer_params": {}, "stream": True},
    {"disaggregated_params": EVIL},
    {"bootstrap_host": "10.0.0.1", "bootstrap_port": 4444, "bootstrap_room": 7},
    {"bootstrap_room": 0},
    {"remote_host": "10.0.0.1"},
    {"remote_port": 4444},
    {"handoff": {"role": "decode", "ticket": "x"}},
    {"ticket": "x"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with session.post(url, json=body) as response:
        return response.status, json.loads((await response.read()).splitlines()[-1])


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")), 0.0)


@pytest.mark.parametrize("front", ["router", "engine"])
async def test_the_front_door_refuses_the_fields(directory: Path, front: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(directory)
    handed: dict[bytes, asyncio.Future[str]] = {}
    engines = [FakeEngine(directory, role=role, handed=handed) for role in ("prefill", "decode", "both")]
    async with contextlib.AsyncExitStack() as stack:
        p, d, both = [await stack.enter_async_context(served(build_engine_app(e, tokenizer))) for e in engines]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = both
        if front == "router":
            app = await build_app(RouterConfig(prefill=(p,), decode=(d,), ticket_key=KEY))
            url = await stack.enter_async_context(served(app))
        for endpoint, body in BODIES.items():
            for fields in FIELDS:
                status, answer = await post(session, url + endpoint, {**body, **fields})
                assert status == 400, fields
                assert answer["error"]["param"] in fields
                assert answer["error"]["type"] == "invalid_request_error"
            assert (await post(session, url + endpoint, {**body, "kv_transfer_params": None}))[0] == 200
            name = f'baton:http_requests_total{{endpoint="{endpoint}",status="400"}}'
            assert await metric(session, url, name) == len(FIELDS)
    assert all(request.handoff is None for request in engines[2].requests)
    assert sum(len(engine.requests) for engine in engines) == (4 if front == "router" else 2)
    assert "refused a client's request that sets kv_transfer_params" in caplog.text


HOSTILE = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "baton": {"role": "decode", "ticket": "x"}}
PARAMS = {"kv_transfer_params": HOSTILE}
# (fields, status): fields in places that no server reads are like any other unknown fields.
ELSEWHERE: list[tuple[dict[str, Any], int]] = [
    ({"extra_body": PARAMS}, 200),
    ({"extra_args": PARAMS}, 200),
    ({"nvext": PARAMS, "metadata": PARAMS}, 200),
    ({"stream_options": PARAMS, "stream": True}, 200),
    ({"vllm_xargs": PARAMS}, 400),  # vLLM takes them from there
    ({"messages": [{"role": "user", "content": "a", **PARAMS}]}, 200),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **PARAMS}]}]}, 200),
    ({"logit_bias": PARAMS}, 400),
    ({"prompt": PARAMS, "messages": PARAMS}, 400),
]


async def test_params_elsewhere_in_a_request_reach_no_engine(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    handed: dict[bytes, asyncio.Future[str]] = {}
    engines = [FakeEngine(directory, role=role, handed=handed) for role in ("prefill", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        p, d = [await stack.enter_async_context(served(build_engine_app(e, tokenizer))) for e in engines]
        app = await build_app(RouterConfig(prefill=(p,), decode=(d,), ticket_key=KEY))
        url = await stack.enter_async_context(served(app))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for endpoint, body in BODIES.items():
            for fields, status in ELSEWHERE:
                async with session.post(url + endpoint, json={**body, **fields}) as response:
                    assert response.status == status, (endpoint, fields, await response.text())
        for twice in (b'"kv_transfer_params": null, "kv_transfer_params": {}', b'"kv_transfer_params": {}'):
            body = json.dumps(BODIES["/v1/completions"]).encode()[:-1] + b", " + twice + b"}"
            async with session.post(f"{url}/v1/completions", data=body) as response:
                assert response.status == 400
    for engine in engines:
        assert "10.0.0.1" not in str(engine.requests)
        assert all(request.handoff is not None and len(request.handoff.ticket) > 100 for request in engine.requests)


MALFORMED = [
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b"9" * 5000,
    b'"\\ud800"',
    b"NaN",
    b'{"baton": ',
]


async def test_hostile_params_disturb_no_other_request(directory: Path) -> None:
    """Each is answered with 400; a concurrent stream is unaffected, and the engines get nothing."""
    tokenizer = Tokenizer.load(directory)
    handed: dict[bytes, asyncio.Future[str]] = {}
    engines = [FakeEngine(directory, role=role, handed=handed, step_s=0.02) for role in ("prefill", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        p, d = [await stack.enter_async_context(served(build_engine_app(e, tokenizer))) for e in engines]
        app = await build_app(RouterConfig(prefill=(p,), decode=(d,), ticket_key=KEY))
        url = await stack.enter_async_context(served(app))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        good = {**BODIES["/v1/completions"], "max_tokens": 60}
        _, alone = await post(session, f"{url}/v1/completions", good)
        running = asyncio.create_task(post(session, f"{url}/v1/completions", good))
        for endpoint, body in BODIES.items():
            for value in MALFORMED:
                hostile = json.dumps(body).encode()[:-1] + b', "kv_transfer_params": ' + value + b"}"
                async with session.post(url + endpoint, data=hostile) as response:
                    assert response.status == 400, value[:20]
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert not running.done(), "the requests met"
        status, answer = await running
        assert (status, answer["choices"]) == (200, alone["choices"])
    assert [len(engine.requests) for engine in engines] == [2, 2]


# ---------------------------------------------------------------- an engine's HTTP port, with a real engine


@contextlib.asynccontextmanager
async def engine(tmp_path: Path) -> AsyncIterator[tuple[str, AsyncEngine, bytes]]:
    model = str(make_checkpoint(tmp_path / "tiny", "llama"))
    key_file = str(tmp_path / "ticket.key")
    key = load_or_create_key(key_file)
    config = EngineConfig(
        model=model, role="decode", engine_id="D", ticket_key_file=key_file, kv_cache_memory=1 << 20
    ).check()
    running = AsyncEngine(config)
    running.start()
    try:
        async with served(build_engine_app(running, Tokenizer.load(model))) as url:
            yield url, running, key
    finally:
        running.close()


async def test_a_ticket_that_the_router_did_not_sign(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No bytes go to the host that it names; nothing is dialled, allocated or kept."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.3)
    async with engine(tmp_path) as (url, running, key), aiohttp.ClientSession() as session:
        prompt, params = [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, seed=0)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        evil = msgspec.structs.replace(
            running.info, engine_id="evil", incarnation="evil-1", control_addresses=[address]
        )
        digest = request_digest(prompt, params)
        ticket = Ticket.between(evil, running.info, "push", digest, (time.monotonic() + 60, time.monotonic() + 60))
        sampling = {"max_tokens": 4, "temperature": 0.0, "seed": 0}
        body = {"request_id": "r", "prompt_token_ids": prompt, "sampling_params": sampling}
        forged = sign_ticket(bytes(32), ticket)
        late = sign_ticket(key, Ticket.between(evil, running.info, "push", digest, (1.0, 1.0)))
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({**body, "handoff": {"role": "decode", "ticket": forged}}, 403, "signature"),
            ({**body, "handoff": {"role": "decode", "ticket": late}}, 403, "expired"),
            ({**body, "handoff": {"role": "decode", "ticket": "x"}}, 403, "base64url"),
            (
                {
                    **body,
                    "prompt_token_ids": [5, 6, 8],
                    "handoff": {"role": "decode", "ticket": sign_ticket(key, ticket)},
                },
                403,
                "another request",
            ),
            ({**body, "handoff": {"role": "decode", "ticket": forged, **EVIL}}, 400, "unknown field"),
            ({**body, "kv_transfer_params": EVIL}, 400, "unknown field"),
            (body, 400, "role is 'decode'"),
        ]
        for asked, status, why in cases:
            answer = await post(session, f"{url}/inference/v1/generate", asked)
            assert answer[0] == status, (asked, answer)
            assert why in answer[1]["error"]["message"]
        endpoint = 'endpoint="/inference/v1/generate"'
        assert await metric(session, url, f'baton:http_requests_total{{{endpoint},status="403"}}') == 4
        assert await metric(session, url, 'baton:handoff_refused_total{kind="ticket"}') == 4
        assert running.load().num_referenced_pages == running.load().num_handoffs == 0
        with pytest.raises(TimeoutError):
            listener.accept()
    listener.close()
    assert "refused the ticket of a request: ticket signature does not match" in caplog.text
