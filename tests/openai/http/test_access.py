"""API keys, and the ids by which requests are known outside."""

from __future__ import annotations

import contextlib
from pathlib import Path

import aiohttp
import pytest

from baton.cli.options import ListenOptions
from baton.errors import ConfigError
from baton.openai.http.access import Access, ApiKeys
from baton.router import RouterConfig
from baton.router import build_app as build_router
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served

KEYS = ("secret-1", "sécret-2")


@pytest.mark.parametrize(
    "given", [None, "", "secret-1", "Basic secret-1", "Bearer", "Bearer secret", "Bearer secret-1 x"]
)
async def test_the_api_needs_a_key(directory: Path, session: aiohttp.ClientSession, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    engine = FakeEngine(directory)
    async with served(build_app(engine, Tokenizer.load(directory), access=Access(KEYS))) as url:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/fake"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/nothing"),
        ):
            async with session.request(method, url + path, headers=headers, data=b"{}") as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/metrics", "/version"):
            async with session.get(url + path, headers=headers) as response:
                assert response.status == 200, path
    assert not engine.requests


@pytest.mark.parametrize("key", KEYS)
async def test_every_key_opens_it(directory: Path, session: aiohttp.ClientSession, key: str) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), access=Access(KEYS))
    headers = {"Authorization": f"bearer {key}"}
    async with served(app) as url, session.get(f"{url}/v1/models", headers=headers) as response:
        assert response.status == 200


async def test_a_router_asks_for_keys_and_its_engines_do_not(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = build_app(FakeEngine(directory), Tokenizer.load(directory))
    async with contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(served(engine))
        url = await stack.enter_async_context(
            served(await build_router(RouterConfig(both=(behind,), access=Access(KEYS))))
        )
        body = {"prompt": "a", "max_tokens": 2}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 401
        headers = {"Authorization": "Bearer secret-1"}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        async with session.get(f"{url}/status") as response:
            assert (await response.json())["ready"]


@pytest.mark.parametrize(
    ("origin", "content_type", "status"),
    [
        (None, "text/plain", 200),
        ("http://evil.example", "text/plain", 415),
        ("http://evil.example", "", 415),
        ("null", "application/x-www-form-urlencoded", 415),
        ("http://good.example", "text/plain", 200),
        ("OWN", "text/plain", 200),
        ("http://evil.example", "application/json; charset=utf-8", 200),  # a browser has asked before
    ],
)
async def test_a_page_of_another_server_cannot_use_the_model(
    directory: Path, session: aiohttp.ClientSession, origin: str | None, content_type: str, status: int
) -> None:
    engine, access = FakeEngine(directory), Access(allowed_origins=("http://good.example",))
    async with served(build_app(engine, Tokenizer.load(directory), access=access)) as url:
        headers = {"Content-Type": content_type}
        if origin is not None:
            headers["Origin"] = url if origin == "OWN" else origin
        body = b'{"prompt": "a", "max_tokens": 1}'
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == status
            assert status == 200 or (await response.json())["error"]["code"] == "unsupported_media_type"
    assert len(engine.requests) == (status == 200)


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^api_key: must not be empty"):
        ApiKeys(["good", " "])


def test_an_empty_key_of_the_environment_does_not_open_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ListenOptions().api_keys() == ()
    monkeypatch.setenv("BATON_API_KEY", "")
    with pytest.raises(ConfigError, match="api_key: BATON_API_KEY is set and empty"):
        ListenOptions().api_keys()
    assert ListenOptions(api_key=["a"]).api_keys() == ("a",)


@pytest.mark.parametrize(
    ("given", "kept"), [("mine-7", True), ("x" * 128, True), ("x" * 129, False), ("", False), (None, False)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_carry_the_requests_id(
    directory: Path, session: aiohttp.ClientSession, given: str | None, kept: bool, stream: bool
) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        body = {"prompt": "a", "max_tokens": 2, "stream": stream}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            first = response.headers["X-Request-Id"]
        async with session.post(f"{url}/v1/completions", json={"prompt": []}, headers=headers) as response:
            assert response.status == 400
            second = response.headers["X-Request-Id"]
    assert (first == given == second) if kept else (len(first) == 32 and first != second)
