"""`python -m testkit.sglang.residues`: prompts of every residue of the page size through real SGLang servers.

For each pair of page sizes, in push and in pull: new prompts, then the same with prefix hits on P, on D, and on both.
Prefill is chunked, everything has digests, answers must be transformers'. Then clients leave at random moments, and
both servers must have all pages again. At the end `baton verify` compares the last pair with one SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import aiohttp

from baton.router import RouterConfig, build_app
from baton.wire import Mode
from testkit.servers.fake_serving import served
from testkit.sglang.servers import (
    LIMIT_S,
    MODEL,
    Config,
    Legs,
    Pair,
    Server,
    check_whole,
    greedy,
    outcome,
    pair_configs,
    prompts,
    serve,
    session,
    ticket_key,
)

SIZES = ((1, 1), (16, 16), (16, 1), (1, 16))
LENGTHS = [*range(1, 34), 63, 64, 65, 130]
NUM, AT_ONCE, CHUNK = 8, 4, 64
# On which server the prompts of a pass have a prefix hit.
HITS: dict[str, tuple[str, ...]] = {"none": (), "P": ("prefill",), "D": ("decode",), "both": ("prefill", "decode")}
LEAVING = 0.4
Known = Sequence[tuple[Sequence[int], list[int]]]  # prompts with their answers


@dataclass(frozen=True, slots=True)
class Pass:
    """`num_bytes`: the KV that D received. `wrong`: what was neither exact nor left by its client."""

    exact: int
    num_bytes: int
    wrong: list[str]


def flush(server: Server) -> None:
    """Empty its prefix cache. It refuses while a request runs."""
    until = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{server.url}/flush_cache", data=b"", timeout=LIMIT_S).close()
            return
        assert time.monotonic() < until, f"{server.name} does not empty its cache"
        time.sleep(0.2)


async def ask_all(pair: Pair, known: Known, legs: Legs) -> Pass:
    """Every prompt once, some at the same time."""
    before, turn = pair.decode.counts().get("bytes", 0), asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, prompt: Sequence[int], want: list[int]) -> str:
        async with turn:
            found = await outcome(http, pair, prompt, NUM, legs)
        return "" if found == want else f"{len(prompt)} tokens: {found} instead of {want}"

    async with session() as http:
        found = await asyncio.gather(*(one(http, *each) for each in known))
    wrong = [text for text in found if text]
    return Pass(len(found) - len(wrong), pair.decode.counts().get("bytes", 0) - before, wrong)


async def leave(pair: Pair, known: Known, legs: Sequence[Legs], num: int) -> tuple[int, int, list[str]]:
    """`num` requests, of which some are left by their clients: how many were exact and left, and what was wrong."""
    rng, turn, numbers = random.Random(1), asyncio.Semaphore(6), [0, 0]
    wrong: list[str] = []

    async def one(http: aiohttp.ClientSession, index: int) -> None:
        prompt, want = known[index % len(known)]
        async with turn:
            task = asyncio.ensure_future(outcome(http, pair, prompt, len(want), legs[index % len(legs)]))
            if rng.random() < LEAVING:
                await asyncio.wait([task], timeout=rng.random() * 0.3)
                if task.cancel():
                    await asyncio.gather(task, return_exceptions=True)
                    numbers[1] += 1
                    return
            found = await task
        numbers[0] += found == want
        if found != want:
            wrong.append(f"{len(prompt)} tokens: {found} instead of {want}")

    async with session() as http:
        await asyncio.gather(*(one(http, index) for index in range(num)))
    return numbers[0], numbers[1], wrong


def run_pair(pair: Pair, name: str, num_leaving: int) -> list[str]:
    """All passes over one pair of servers. Returns what was wrong."""
    wrong: list[str] = []
    for seed, mode in enumerate(get_args(Mode)):
        found = prompts(LENGTHS, seed=100 * seed + len(name))
        known = list(zip(found, greedy(found, NUM), strict=True))
        legs = pair.minter(mode)
        text, started, moved = [], time.monotonic(), {}
        for hits, servers in HITS.items():
            for role in {"prefill", "decode"} - set(servers):
                flush(getattr(pair, role))
            one = asyncio.run(ask_all(pair, known, legs))
            wrong += one.wrong
            moved[hits] = one.num_bytes
            text.append(f"hits on {hits} {one.exact}/{len(known)} ({one.num_bytes / 1e6:.2f} MB)")
        if max(moved["D"], moved["both"]) >= min(moved["none"], moved["P"]):
            wrong.append(f"hits on D spared no bytes: {moved}")
        print(f"pages {name}, {mode}: {', '.join(text)}; {time.monotonic() - started:.0f} s", flush=True)
    both: list[Legs] = [pair.minter(mode) for mode in get_args(Mode)]
    exact, left, bad = asyncio.run(leave(pair, known, both, num_leaving))
    check_whole(pair.prefill, pair.decode)
    print(f"pages {name}: {exact} exact, {left} left by their clients, {len(bad)} wrong; pools whole", flush=True)
    return wrong + bad


async def verify(pair: Pair, one: Server, *further: str, model: Path = MODEL) -> int:
    """Run `baton verify` with `further` arguments on the pair, through a router, and `one`. Returns its exit status."""
    urls = {role: (getattr(pair, role).url,) for role in ("prefill", "decode")}
    settings = RouterConfig(**urls, ticket_key=pair.key, engine="sglang")
    async with served(await build_app(settings)) as url:
        command = [sys.executable, "-m", "baton.cli", "verify", str(model), "--reference", one.url, "--candidate", url]
        command += ["--max-tokens", "16", "--ignore-eos", *further]
        return await asyncio.to_thread(lambda: subprocess.run(command, check=False, timeout=LIMIT_S).returncode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaving", type=int, default=200, help="requests, of some of which the client leaves")
    parser.add_argument("--sizes", help="page sizes of P and D, such as 16,1; all four pairs by default")
    arguments = parser.parse_args()
    sizes = SIZES if arguments.sizes is None else (tuple(map(int, arguments.sizes.split(","))),)
    wrong: list[str] = []
    for prefill, decode in sizes:
        with tempfile.TemporaryDirectory(prefix="baton-residues-") as directory:
            folder = Path(directory)
            flags = ["--page-size", str(prefill), "--chunked-prefill-size", str(CHUNK)]
            more = ["--page-size", str(decode), "--disaggregation-decode-enable-radix-cache"]
            configs = pair_configs(folder, flags, more, settings={"integrity": "full"})
            last = (prefill, decode) == sizes[-1]
            with serve(folder, [*configs, *([Config("one")] if last else [])]) as servers:
                pair = Pair(*servers[:2], ticket_key(folder))
                wrong += run_pair(pair, f"{prefill} to {decode}", arguments.leaving)
                if last and asyncio.run(verify(pair, servers[2])):
                    wrong.append("baton verify found a difference")
    print("\n".join(wrong[:20]) or "nothing was wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
