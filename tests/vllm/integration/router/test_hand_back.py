"""Conversations over real vLLM servers: the prefill server, with two tensor ranks or with windows, gets what the decode
server has answered, the drafter's KV too, and computes what is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.handoff.session.keys import make_keys
from baton.router.config.policy_config import PolicyConfig
from benchmarks.scrape import scrape
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, VllmServer, serve
from testkit.servers.fake_serving import status_of
from testkit.vllm.checkpoints import windowed
from testkit.vllm.servers import EAGLE3, LIMIT_S, MODEL, OWN_PROCESS, demo_prompts
from tests.vllm.integration.router.test_router import alone, baton, complete, parts_at, routed, until_free

pytestmark = pytest.mark.timeout(1800)

MODES, SIZE = ("push", "pull"), 32
# Tokens of each turn. No answer ends just after a block: vLLM does not enter what its last verification filled.
NEW = [150, 51, 47]
DENSE = ["--prefix-cache-retention-interval", str(SIZE)]  # by default vLLM keeps no windows of answers
WINDOW_STARTS = 2  # the block in which the window of the first turn begins


@dataclass
class Servers:
    """P and D, their folder, and where D publishes. `windows`: one of D's cache groups has them."""

    p: VllmServer
    d: VllmServer
    folder: Path
    ports: dict[str, str]
    num_groups: int
    windows: bool

    def num_blocks(self, num_tokens: int) -> int:
        """Of a chat on D: the conversation's, and those of the reference, which have its salt."""
        blocks = num_tokens // SIZE
        return 2 * self.num_groups * blocks - WINDOW_STARTS * self.windows


@pytest.fixture(scope="module", params=["two ranks", "windows"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, windows = tmp_path_factory.mktemp("back"), request.param == "windows"
    model = folder / "model" if windows else MODEL
    if windows:
        windowed(model)
    ports = {name: f"ipc://{folder}/{name}" for name in ("endpoint", "replay_endpoint")}  # vLLM listens there
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **ports}
    own = {
        "P": ONE_PROCESS if windows else [*OWN_PROCESS, "--tensor-parallel-size", "2"],
        "D": [*ONE_PROCESS, "--kv-events-config", json.dumps(events), *(DENSE if windows else [])],
    }
    make_keys(folder / "keys", ["P", "D"])
    common = ["--block-size", str(SIZE), "--speculative-config", json.dumps(EAGLE3), "--max-model-len", "1024"]
    configs = [ServerConfig(name, [*common, *flags], baton(folder, "kv_both", name)) for name, flags in own.items()]
    with serve(sys.executable, str(model), folder, configs) as (p, d):
        yield Servers(p, d, folder, ports, 3 if windows else 1, windows)


async def known(session: aiohttp.ClientSession, url: str, least: int) -> None:
    """Wait until D's events have told of so many blocks."""
    until = time.monotonic() + LIMIT_S
    while sum(found := await scrape(session, url, "baton:router_engine_kv_blocks")) < least:
        assert time.monotonic() < until, (found, least)
        await asyncio.sleep(0.05)


async def computed(session: aiohttp.ClientSession, server: VllmServer) -> float:
    """Prompt tokens that a server has computed."""
    return sum(await scrape(session, server.url, "vllm:prompt_tokens_by_source", source="local_compute"))


def test_a_conversations_answers_are_not_computed_again(servers: Servers) -> None:
    p, d, ports = servers.p, servers.d, servers.ports
    config: dict[str, Any] = {
        "allow_mode_override": True,
        "policy_config": PolicyConfig(hand_back=True, min_hand_back_length=0, hand_back_limit_s=LIMIT_S),
        "kv_event_source": (f"{d.url}={ports['endpoint']}",),
        "kv_event_replay_source": (f"{d.url}={ports['replay_endpoint']}",),
    }

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            url = await stack.enter_async_context(routed(p.url, d.url, servers.folder, **config))
            num_blocks = 0
            for mode in MODES:
                chat = list[int]()
                for more in demo_prompts(NEW, seed=300 + (mode == "pull")):
                    before, chat = len(chat), chat + more
                    so_far = await computed(session, p)
                    answer = await complete(session, url, chat, max_tokens=50, ignore_eos=True, kv_mode=mode)
                    new = await computed(session, p) - so_far
                    want = (await alone(session, d, chat, max_tokens=50, ignore_eos=True))["choices"][0]
                    found = answer["choices"][0]["token_ids"]
                    assert parts_at(found, want) is None
                    if before:
                        # D lacks the end of its answer, which fills no block. Also one vLLM computes the last block
                        # that it finds again, for the drafter, or with windows the hand-back's leg does. This leg
                        # computes a token more.
                        assert new <= len(chat) - before // SIZE * SIZE + SIZE + 1
                    chat += found
                    await known(session, url, num_blocks + servers.num_blocks(len(chat) - 1))
                num_blocks += servers.num_blocks(len(chat) - 1)
            backs = (await status_of(session, url))["hand_backs"]
            assert (backs["completed"], backs["failed"]) == (len(MODES) * (len(NEW) - 1), 0), backs
            await until_free(session, (p, d))

    asyncio.run(run())
