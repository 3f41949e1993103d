"""Endpoints of models that generate no text answer in OpenAI's format with an alternative."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from baton.openai.api_routes import _NOT_GENERATED
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served
from testkit.servers.fleets import Cluster


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_an_engine_refuses_endpoints_that_do_not_generate(
    directory: Path, session: aiohttp.ClientSession, method: str
) -> None:
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        for path, made in _NOT_GENERATED.items():
            async with session.request(method, f"{url}{path}", json={"input": "a"}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (400, "invalid_request_error")
                assert error["message"].startswith(f"{path} is not served here: this model generates text")
                assert made in error["message"]
        async with session.get(f"{url}/openapi.json") as response:
            assert not (await response.json())["paths"].keys() & _NOT_GENERATED.keys()


async def test_a_router_refuses_endpoints_that_do_not_generate(directory: Path) -> None:
    cluster, body = Cluster(directory, num_prefill=1, num_decode=1), {"input": "a"}
    async with cluster.run() as (url, session), session.post(f"{url}/v1/embeddings", json=body) as response:
        assert response.status == 400
        assert "/v1/embeddings is not served here" in (await response.json())["error"]["message"]
