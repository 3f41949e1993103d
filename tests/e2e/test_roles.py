"""Real engines whose roles limit what the router uses them for, not what they can do: one continues exactly without the
other.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.bench.timed_stream import stream_completion
from benchmarks.deployment import BreakableDeployment
from benchmarks.scrape import get_json, scrape, until_idle

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
# On free ports; the engines tell the router which.
EVENTS = {
    "enable_kv_cache_events": True,
    **dict.fromkeys(("endpoint", "replay_endpoint"), "tcp://127.0.0.1:*"),
}
TOKEN = "t" * 32
PROMPT = [3 + (7 * i) % 2000 for i in range(300)]
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableDeployment]:
    """A prefill and a decode engine for this file's requests only, in order."""
    token: Path = tmp_path_factory.mktemp("admin") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with BreakableDeployment(
        TARGET,
        engine_flags=[
            *("--batch-invariant", "--speculative-config", json.dumps(EAGLE3)),
            *("--kv-events-config", json.dumps(EVENTS)),
        ],
        router_flags=["--max-local-prefill-length", "64", "--admin-token-file", str(token)],
    ) as running:
        yield running


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], **more: Any) -> tuple[int, ...]:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0.0, "seed": 0, **more}
    return tuple((await stream_completion(session, url, body)).token_ids)


async def decisions(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    found = (await get_json(session, f"{url}/status"))["decisions"]
    return {name: count for name, count in found.items() if count and name not in ("summary", "last")}


async def accepted(session: aiohttp.ClientSession, engine: str) -> list[float]:
    return await scrape(session, engine, "baton:spec_decode_num_accepted_tokens_per_pos")


def test_a_held_prompt_and_a_lost_role(deployment: BreakableDeployment) -> None:
    asyncio.run(_a_held_prompt_and_a_lost_role(deployment))


async def _a_held_prompt_and_a_lost_role(up: BreakableDeployment) -> None:
    p, d = up.engine_urls
    async with aiohttp.ClientSession() as session:
        want = await ask(session, up.url, PROMPT)
        once = await accepted(session, d)
        for name in ("plan", "post", "transfer"):
            assert sum(await scrape(session, p, f"baton:handoff_{name}_seconds_count")) >= 2, "of target and drafter"
        assert len(await scrape(session, p, "baton:handoff_copied_bytes")) == 2
        for name in ("register_to_commit", "commit_to_first_step"):
            assert await scrape(session, d, f"baton:handoff_{name}_seconds_count") == [1.0]
        # The router's metrics page has those of all engines.
        assert len(await scrape(session, up.url, "baton:handoff_plan_seconds_count")) == 2
        assert await decisions(session, up.url) == {"handed_off": 1}
        assert await ask(session, up.url, PROMPT) == want
        assert await accepted(session, d) == [2 * count for count in once], "the same drafts are accepted"
        assert await decisions(session, up.url) == {"handed_off": 1, "cached": 1}
        # The prompt's blocks of target and drafter, on both engines, by their events.
        blocks = [0.0, 0.0]
        while min(blocks) < 2 * (len(PROMPT) // 16):
            blocks = await scrape(session, up.url, "baton:router_engine_kv_blocks")
            assert len(blocks) == 2
        # The next turn of a conversation: D also holds its own output.
        turn = [*PROMPT, *want, *range(5, 25)]
        said = await ask(session, up.url, turn)
        assert await decisions(session, up.url) == {"handed_off": 1, "cached": 2}
        assert await ask(session, up.url, turn, cache_salt="x") == said, "handed off, and computed anew"
        assert await decisions(session, up.url) == {"handed_off": 2, "cached": 2}

        up.stop("prefill-0")
        assert await ask(session, up.url, PROMPT) == want
        assert await ask(session, up.url, PROMPT[:50]) != want
        before = Counter(await decisions(session, up.url))
        # A slow answer gives the router time to miss the prefill engine.
        assert (before.total(), before["handed_off"]) == (6, 2)
        while all(engine["healthy"] for engine in (await get_json(session, f"{up.url}/status"))["engines"]):
            await asyncio.sleep(0.05)
        assert await ask(session, up.url, PROMPT, cache_salt="y") == want
        assert (await decisions(session, up.url))["no_prefill_engine"] == before["no_prefill_engine"] + 1
        up.cont("prefill-0")
        while not all(engine["healthy"] for engine in (await get_json(session, f"{up.url}/status"))["engines"]):
            await asyncio.sleep(0.05)

        up.kill("decode-0")
        while (await get_json(session, f"{up.url}/status"))["engines"][1]["healthy"]:
            await asyncio.sleep(0.05)
        assert await ask(session, up.url, PROMPT) == want
        assert (await decisions(session, up.url))["no_decode_engine"] == 1
        await until_idle(session, [p])
