"""Requests through a router to two vLLM servers whose clients leave, or whose prefill server dies. Afterwards no server
may hold a block, and every answer is one vLLM's, or ended by a named error."""

from __future__ import annotations

import asyncio
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.vllm.servers import VllmServer

_AT_ONCE = 16
_LEAVING = 64
_NUM = 40
_TOKENS = (3, 2000)  # of the demo models
_LENGTHS = (100, 3000)
_IDLE_S = 30.0
_FAILED_S = 30.0  # an answer that no error ends is a defect
_EQUAL = "as one vLLM"
_TIE = 0.1  # nats
_TIMEOUT = aiohttp.ClientTimeout(total=90)


@dataclass(frozen=True, slots=True)
class Answer:
    """`margins`: from each token to the second best, in nats."""

    tokens: list[int]
    margins: list[float]


def metrics(server: VllmServer, name: str) -> dict[str, float]:
    """Samples of a metric, by outcome or by name."""
    text = urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith(name):
            label = re.search(r'outcome="([^"]+)"', line)
            found[label[1] if label else name] = float(line.rpartition(" ")[2])
    return found


def outcomes(decode: VllmServer) -> str:
    """Handoffs of a decode server so far."""
    ends = ", ".join(f"{count:.0f} {end}" for end, count in metrics(decode, "vllm:baton_handoffs_total").items())
    (nbytes,) = metrics(decode, "vllm:baton_handoff_bytes_total").values() or (0.0,)
    return f"handoffs so far: {ends or 'none'}; {nbytes / 1e6:.1f} MB"


def leave(servers: Sequence[VllmServer], url: str) -> bool:
    """Clients leave at random, `_AT_ONCE` at a time."""
    left = asyncio.run(_leave(url))
    return _empty(servers[:2], f"{left} of {_LEAVING} clients left")


async def _leave(url: str) -> int:
    left = 0

    async def one(session: aiohttp.ClientSession, which: int) -> None:
        nonlocal left
        rng = random.Random(which)
        asked = asyncio.create_task(_ask(session, url, _prompt(rng), ("push", "pull")[which % 2]))
        done, _ = await asyncio.wait([asked], timeout=rng.random() * 0.3)
        left += not done
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        for start in range(0, _LEAVING, _AT_ONCE):
            await asyncio.gather(*(one(session, start + which) for which in range(_AT_ONCE)))
    return left


def kill(servers: Sequence[VllmServer], url: str) -> bool:
    """The prefill server's processes are killed while `_AT_ONCE` requests run."""
    ends, slowest = asyncio.run(_kill(servers, url))
    told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    good = all(end in (_EQUAL, "near-tie") or end.startswith("error ") for end in ends) and slowest < _FAILED_S
    return _empty(servers[1:2], f"P was killed: {told}; the last after {slowest:.1f} s") and good


async def _kill(servers: Sequence[VllmServer], url: str) -> tuple[Counter[str], float]:
    prefill, _, one = servers
    prompts = [_prompt(random.Random(1000 + which)) for which in range(_AT_ONCE)]
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        started = time.monotonic()
        expected = [await _ask(session, one.url, prompt, None) for prompt in prompts]
        each = (time.monotonic() - started) / _AT_ONCE
        asked = [
            asyncio.create_task(_ask(session, url, prompt, ("push", "pull")[which % 2]))
            for which, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(each / 2)
        killed = time.monotonic()
        await asyncio.to_thread(prefill.kill)
        found = await asyncio.gather(*asked, return_exceptions=True)
        taken = time.monotonic() - killed
    ends = Counter(end_of(want, have) for want, have in zip(expected, found, strict=True))
    return ends, taken


def end_of(want: Answer | str, have: object) -> str:
    if not isinstance(have, Answer) or isinstance(want, str):
        return str(have)
    parting = next((at for at, pair in enumerate(zip(want.tokens, have.tokens, strict=True)) if len({*pair}) > 1), None)
    if parting is None:
        return _EQUAL
    return "near-tie" if want.margins[parting] < _TIE else "other tokens"


async def _ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], mode: str | None) -> Answer | str:
    """Greedy tokens, or "error " and its code."""
    body = {"model": "demo", "prompt": list(prompt), "max_tokens": _NUM, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 2, "return_tokens_as_token_ids": True} | (
        {} if mode is None else {"kv_mode": mode}
    )
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        return f"error {answer['error']['code']}"
    choice = answer["choices"][0]
    tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return Answer(choice["token_ids"], [top[0] - top[1] for top in tops])


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(*_TOKENS) for _ in range(rng.randrange(*_LENGTHS))]


def _empty(servers: Sequence[VllmServer], told: str) -> bool:
    until = time.monotonic() + _IDLE_S
    while time.monotonic() < until:
        usage = {server.name: max(metrics(server, "vllm:kv_cache_usage_perc").values()) for server in servers}
        if not any(usage.values()):
            break
        time.sleep(0.2)
    held = ", ".join(f"{name} {share:.2%}" for name, share in usage.items() if share) or "none"
    print(f"  - {told}; blocks held afterwards: {held}", flush=True)
    return held == "none"
