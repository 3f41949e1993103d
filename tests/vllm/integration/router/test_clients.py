"""OpenAI's client against the router over two real vLLM servers, which apply the grammars themselves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from baton.handoff.session.keys import make_keys
from baton.openai.tools import Parsing
from benchmarks import smollm2
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, serve
from tests.vllm.integration.router.test_router import baton, routed

openai = pytest.importorskip("openai")
from tests.clients.conversations import ALL, Conversations  # noqa: E402

pytestmark = pytest.mark.timeout(1800)


def test_conversations(tmp_path: Path) -> None:
    """All conversations of `tests/clients`, which use stand-ins there."""
    try:
        model = smollm2.smollm2()
    except smollm2.NotAvailableError as error:
        pytest.skip(str(error))
    make_keys(tmp_path / "keys", ["P", "D"])
    flags = [*ONE_PROCESS, "--block-size", "32", "--max-model-len", "2048"]
    configs = [
        ServerConfig(name, flags, baton(tmp_path, role, name))
        for name, role in (("P", "kv_producer"), ("D", "kv_consumer"))
    ]
    with serve(sys.executable, str(model), tmp_path, configs) as (p, d):

        async def act() -> None:
            async with routed(p.url, d.url, tmp_path, parsing=Parsing(True, "hermes", None)) as url:
                await asyncio.to_thread(converse, url)

        asyncio.run(act())


def converse(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0) as client:
        for conversation in ALL:
            conversation(Conversations(client))
