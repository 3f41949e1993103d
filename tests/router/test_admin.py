"""Instances can be changed with the admin token, but not by a web page in its holder's browser."""

from __future__ import annotations

import json
import os
from pathlib import Path

import aiohttp
import pytest

from baton.errors import ConfigError
from baton.router import RouterConfig, build_app
from baton.router.admin import TOKEN_VARIABLE, admin_token
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import ADMIN, ADMIN_TOKEN, FakeEngine, served

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (JSON, 401),
        ({**JSON, "Authorization": "Bearer wrong"}, 401),
        ({**JSON, "Authorization": f"Basic {ADMIN_TOKEN}"}, 401),
        ({**ADMIN, "Content-Type": "text/plain"}, 415),
        ({**ADMIN, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({**ADMIN, **JSON, "Origin": "http://evil.example"}, 403),
        ({**ADMIN, **JSON, "Origin": "null"}, 403),
        ({**ADMIN, **JSON, "Origin": "http://localhost:8000"}, 403),  # another port is another server
        ({**ADMIN, **JSON, "Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({**ADMIN, **JSON, "Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({**ADMIN, **JSON, "Host": "evil.example"}, 403),
        ({**ADMIN, **JSON, "Host": "evil.example:8000"}, 403),
        ({**ADMIN, **JSON, "Host": "localhost:8000"}, 200),
        ({**ADMIN, **JSON, "Host": "router.internal"}, 200),
        ({**ADMIN, **JSON}, 200),
    ],
)
async def test_only_the_operator_changes_engines(directory: Path, headers: dict[str, str], status: int) -> None:
    async with served(build_engine_app(FakeEngine(directory), Tokenizer.load(directory))) as engine:
        config = RouterConfig(both=(engine,), admin_token=ADMIN_TOKEN, host_names=("router.internal",))
        async with served(await build_app(config)) as url, aiohttp.ClientSession() as session:
            body = json.dumps({"url": engine}).encode()
            async with session.post(f"{url}/instances/remove", data=body, headers=headers) as response:
                assert response.status == status
                answer = await response.json()
            if status != 200:
                assert answer["error"]["type"] in ("authentication_error", "permission_error", "invalid_request_error")
            async with session.get(f"{url}/status") as response:
                assert len((await response.json())["engines"]) == (0 if status == 200 else 1)


async def test_without_a_token_there_is_no_administration(directory: Path) -> None:
    config = RouterConfig(both=("http://127.0.0.1:1",))
    async with served(await build_app(config)) as url, aiohttp.ClientSession() as session:
        for path in ("add", "remove"):
            async with session.post(f"{url}/instances/{path}", json={}, headers=ADMIN) as response:
                assert response.status == 403
                assert "--admin-token-file" in (await response.json())["error"]["message"]


def test_the_admin_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert admin_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "e" * 20)
    assert admin_token(None) == "e" * 20
    path = tmp_path / "token"
    made = admin_token(str(path))
    assert made is not None
    assert len(made) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert admin_token(str(path)) == made
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="may be read by others"):
        admin_token(str(path))
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        admin_token(None)
    with pytest.raises(ConfigError, match="admin_token_file"):
        admin_token(str(tmp_path / "none" / "token"))
