"""SIGKILL of a decode engine while requests have no token: when the first token comes, and what they waited for.

    python -m benchmarks.faults.first_token                          1 P and 2 D under `baton up`, 6 prompts at once
    python -m benchmarks.faults.first_token --decode 1 --rounds 5    P computes all that is left

Each round sends prompts twice: without a kill, for the time to the first token that the load itself costs, and with
one. All prompts differ, so no prefix is found. A line for each request that was routed to the killed engine and had
no token: the events of its timeline in the router, in milliseconds after the kill. Then P's queue at these times.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.errors import BatonError
from baton.openai.client import OpenAIClient
from benchmarks.faults.supervised import Supervised
from benchmarks.scrape import get_json

TARGET = "models/baton-demo-llama"
KILLED, PREFILL = "decode-0", "prefill-0"
_POLL_S = 0.02


@dataclass(slots=True)
class Round:
    """One round's times in seconds. `undisturbed`: to the first token without a kill. `after_kill`: from the kill to
    the first token, of requests that had none and were on the killed engine. `lines`: their timelines.
    """

    undisturbed: list[float] = field(default_factory=list)
    after_kill: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sent:
    name: str
    began: float
    first: float | None = None


class _Rounds:
    def __init__(self, up: Supervised, requests: int, tokens: int, after_s: float, seed: int) -> None:
        self._up, self._requests, self._tokens, self._after_s = up, requests, tokens, after_s
        self._rng, self._number = random.Random(seed), 0

    async def run(self, rounds: int) -> list[Round]:
        done = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            await self._both_back()
            for _ in range(rounds):
                found = Round()
                for sent in await self._send():
                    found.undisturbed.append((sent.first or time.monotonic()) - sent.began)
                await self._killing(found)
                await self._both_back()
                done.append(found)
        return done

    async def _send(self) -> list[_Sent]:
        tasks = [asyncio.create_task(self._one()) for _ in range(self._requests)]
        return list(await asyncio.gather(*tasks))

    async def _one(self) -> _Sent:
        self._number += 1
        sent = _Sent(f"first-token-{self._number}", time.monotonic())
        prompt = [self._rng.randrange(300, 1000) for _ in range(self._tokens)]
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with aiohttp.ClientSession(headers={"X-Request-Id": sent.name}) as session:
            async for event in OpenAIClient(session, self._up.url).stream(body):
                if sent.first is None and any(choice.token_ids for choice in event.choices):
                    sent.first = time.monotonic()
        return sent

    async def _killing(self, found: Round) -> None:
        sending = asyncio.create_task(self._send())
        looks: list[tuple[float, str]] = []
        looking = asyncio.create_task(self._look(looks))
        await asyncio.sleep(self._after_s)
        killed = time.monotonic()
        self._up.kill(KILLED)
        sent = await sending
        looking.cancel()
        for one in sent:
            events = await self._events(one.name)
            begun = [(one.began + event["at_ms"] / 1000 - killed, event) for event in events]
            hit = any(at < 0 and KILLED in event["text"] for at, event in begun if event["name"] == "route")
            if one.first is None or one.first < killed or not hit:
                continue
            found.after_kill.append(one.first - killed)
            told = ", ".join(f"{at * 1e3:+.0f} {event['name']} {event['text'][:60]}".rstrip() for at, event in begun)
            found.lines.append(f"  {one.name}: first token {(one.first - killed) * 1e3:.0f} ms after the kill: {told}")
        found.lines += [f"  {(at - killed) * 1e3:+.0f} ms: {text}" for at, text in looks if at > killed - 0.1]

    async def _events(self, name: str) -> list[dict[str, Any]]:
        answer = await get_json(self._session, f"{self._up.url}/dashboard/requests/{name}")
        events: list[dict[str, Any]] = answer["choices"][0]["events"]
        return events

    async def _look(self, looks: list[tuple[float, str]]) -> None:
        """Note P's queue whenever it changes."""
        while True:
            try:
                load = await get_json(self._session, f"{self._up.engines[PREFILL]}/inference/v1/load")
            except (BatonError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                load = {"error": type(error).__name__}
            names = (
                "num_running",
                "num_waiting",
                "num_handoffs",
                "num_referenced_pages",
                "num_quarantined_pages",
                "num_prefix_hits",
            )
            text = "P " + ", ".join(f"{name} {load[name]}" for name in names if name in load)
            if not looks or looks[-1][1] != text:
                looks.append((time.monotonic(), text))
            await asyncio.sleep(_POLL_S)

    async def _both_back(self) -> None:
        """Wait until the router uses every engine."""
        while True:
            state = await get_json(self._session, f"{self._up.url}/status")
            if all(engine["healthy"] for engine in state["engines"]):
                return
            await asyncio.sleep(0.1)


def run(
    requests: int = 6, tokens: int = 3000, after_s: float = 0.5, rounds: int = 3, decode: int = 2, seed: int = 0
) -> list[Round]:
    """All rounds. The deployment has ended when this returns."""
    flags = ["--max-local-prefill-length", "0"]
    with Supervised(TARGET, 1, decode, flags) as up:
        return asyncio.run(_Rounds(up, requests, tokens, after_s, seed).run(rounds))


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    return f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f} s (n {len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--after", type=float, default=0.5, help="seconds from the requests to the kill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for number, one in enumerate(
        run(given.requests, given.tokens, given.after, given.rounds, given.decode, given.seed)
    ):
        print(f"round {number}: first token without a kill {_spread(one.undisturbed)}")
        print(f"         after the kill {_spread(one.after_kill)}")
        print("\n".join(one.lines))


if __name__ == "__main__":
    main()
