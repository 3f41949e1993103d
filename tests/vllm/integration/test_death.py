"""One of two engines dies in the middle of handoffs: exact tokens or an end, and every block back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from servers import ask, demo_prompts, reference, request, same, serve_pair

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("victim", ["P", "D"])
def test_an_engine_dies_while_it_is_needed(victim: Literal["P", "D"], tmp_path: Path) -> None:
    with serve_pair(tmp_path, prefill=["--max-num-batched-tokens", "256"]) as pair:
        dead, alive = (pair.prefill, pair.decode) if victim == "P" else (pair.decode, pair.prefill)

        async def run() -> None:
            prompts = demo_prompts([2500] * 4, seed=23)
            async with aiohttp.ClientSession() as session:
                expected = [await reference(session, alive, prompt, 16) for prompt in prompts]
                legs: list[list[asyncio.Task[dict[str, Any]]]] = []
                for prompt in prompts:
                    ticket = pair.ticket(prompt, "push")
                    prefill = request(prompt, 1, {"role": "prefill", "ticket": ticket})
                    decode = request(prompt, 16, {"role": "decode", "ticket": ticket})
                    bodies = ((pair.prefill, prefill), (pair.decode, decode))
                    legs.append([asyncio.create_task(ask(session, server, body)) for server, body in bodies])
                await asyncio.sleep(0.5)
                dead.kill()
                for (prefill_leg, decode_leg), (want, margins) in zip(legs, expected, strict=True):
                    ends = await asyncio.gather(prefill_leg, decode_leg, return_exceptions=True)
                    if victim == "P":
                        answer = ends[1]
                        assert isinstance(answer, dict), answer
                        assert same(answer["choices"][0]["token_ids"], want, margins) is not False
                for _ in range(120):
                    usage = alive.metrics("vllm:kv_cache_usage_perc")
                    if not any(usage.values()):
                        return
                    await asyncio.sleep(0.5)
                raise AssertionError(f"blocks are held: {usage}")

        asyncio.run(run())
