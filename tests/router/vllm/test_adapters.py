"""The router over vLLM servers with LoRA adapters: a client names one as its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from testkit.servers.vllm_pair import Pair, complete, said

ADAPTER = "lora@0123"


async def listed(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/v1/models") as response:
        return {model["id"]: model["parent"] for model in (await response.json())["data"]}


@pytest.mark.parametrize("seed", [False, True])
async def test_an_adapter_is_handed_off_like_its_model(directory: Path, seed: bool) -> None:
    """The servers check that the ticket is for it."""
    pair = Pair(directory, seed=seed, adapter=ADAPTER)
    async with pair.run() as (url, session):
        assert await listed(session, url) == {"demo": None, "lora": "demo"}
        status, answer = await complete(session, url, model="lora")
        assert (status, answer["model"]) == (200, "lora")
        assert answer["choices"][0]["token_ids"] == said(6)
        assert pair.legs() == [["prefill"], ["decode"]]
        assert {body["model"] for body in (*pair.p.legs("prefill"), *pair.d.legs("decode"))} == {"lora"}
        _, answer = await complete(session, url)
        assert answer["model"] == "demo"
        assert pair.d.legs("decode")[-1]["model"] == "demo"


async def test_an_adapter_of_other_files_on_each_server_is_refused(directory: Path) -> None:
    pair = Pair(directory, adapter=ADAPTER)
    pair.d.adapter = "lora@4567"
    async with pair.run() as (url, session):
        assert await listed(session, url) == {"demo": None}
        status, answer = await complete(session, url, model="lora")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_server_without_the_adapter_gets_no_leg_of_it(directory: Path) -> None:
    pair = Pair(directory, adapter=ADAPTER)
    pair.p.adapter = ""
    async with pair.run() as (url, session):
        status, answer = await complete(session, url, model="lora")
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
        assert pair.legs() == [[], ["none"]]


async def test_other_connectors_do_not_tell_what_their_adapters_are(directory: Path) -> None:
    async with Pair(directory, "NixlConnector", adapter=ADAPTER).run() as (url, session):
        assert await listed(session, url) == {"demo": None}
