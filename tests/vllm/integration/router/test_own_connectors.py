"""The router over real vLLM servers that hand over with vLLM's own connectors: the answers of one server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from benchmarks.vllm.servers import VllmServer
from testkit.vllm.servers import demo_prompts
from tests.vllm.integration.router.test_router import alone, complete, routed, same_as_one_server, serve_pair

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("kind", ["NixlConnector", "NixlPushConnector"])
def test_vllms_own_connectors(tmp_path: Path, kind: str) -> None:
    async def run(p: VllmServer, d: VllmServer) -> None:
        async with aiohttp.ClientSession() as session, routed(p.url, d.url, tmp_path, kv_connector=kind) as url:
            prompts = demo_prompts([1, 2, 31, 32, 33, 64, 97, 333], seed=9)
            await same_as_one_server(session, url, d, prompts)
            (prompt,) = demo_prompts([90], seed=10)
            want = await alone(session, d, prompt, temperature=0.8, seed=7)
            have = await complete(session, url, prompt, temperature=0.8, seed=7)
            assert have["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]

    with serve_pair(tmp_path, kind, None) as (p, d):
        asyncio.run(run(p, d))
