"""How many nested async generators each token passes in the router, where every one costs a turn: none, except for the
first ones.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from baton.router.policies import PolicyConfig
from testkit.servers.fleets import Gate, Setup
from testkit.servers.vllm_pair import Pair

NUM_TOKENS = 12
SERVICE = ["openai/service.py:_events", "openai/service.py:_sample"]
ROUTER = ["router/router_backend.py:generate", "router/attempts/join.py:join_legs"]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Items that async generators of the router and the API yield, by function."""
    items: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, value: object) -> None:
        # An item is wrapped; what a generator awaits is not.
        if event == "return" and frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR:
            path, _, name = frame.f_code.co_filename.rpartition("/baton/")
            if path and type(value).__name__ == "async_generator_wrapped_value":
                items[f"{name}:{frame.f_code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        yield items
    finally:
        sys.setprofile(None)


def passed(items: Counter[str], num: int) -> list[str]:
    """Those that so many tokens pass, but of the router alone."""
    return sorted(name for name, found in items.items() if found >= num and name.startswith(("router/", "openai/")))


@contextlib.asynccontextmanager
async def baton_engines(directory: Path, gate: Gate) -> AsyncIterator[tuple[str, Any]]:
    """With all that accompanies legs: spans, and prefixes handed back."""
    setup = Setup(directory, accept=0)
    setup.decode.pause = gate
    config = PolicyConfig(hand_back=True)
    async with setup.run(policy_config=config, trace=str(directory / "spans.json")) as (url, session):
        yield url, session


@contextlib.asynccontextmanager
async def vllm_servers(directory: Path, gate: Gate) -> AsyncIterator[tuple[str, Any]]:
    pair = Pair(directory, "BatonConnector", seed=True)
    pair.d.pause = gate
    async with pair.run() as (url, session):
        yield url, session


@pytest.mark.parametrize(
    ("serving", "client"),
    [(baton_engines, "router/clients/engine_client.py:generate"), (vllm_servers, "router/clients/vllm_client.py:leg")],
)
async def test_only_the_first_tokens_pass_generators(serving: Any, client: str, directory: Path) -> None:
    gate = Gate()
    async with serving(directory, gate) as (url, session):
        body = {"prompt": [10, 11, 12], "max_tokens": NUM_TOKENS + 4, "temperature": 0, "stream": True}
        with counted() as items:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.content.readuntil(b"\n\n")
                await gate.open(session, url)
                await response.read()
    assert {name for name in (*SERVICE, *ROUTER, client) if items[name] < 2} == set()
    assert passed(items, NUM_TOKENS // 2) == []
