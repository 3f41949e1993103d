"""The time to the first token of SGLang's P/D through a router, on CPUs: Baton's router and connector, against
sglang-router and SGLang's `mooncake_tcp`, whose decode server says the first token.

    python tools/install_sglang.py python -m benchmarks.sglang.routers --sglang-router PYTHON

The pairs take turns, each with a new router; the other pair's servers are stopped (SIGSTOP) meanwhile. Prompts are new
text, and each request has a new connection. PYTHON is of an environment with sglang-router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from baton.errors import BatonError
from benchmarks.sglang.handoffs import PAIR, TIMEOUT, own_configs
from testkit.sglang.servers import MODEL, Server, free_port, pair_configs, serve

WARM_UP = 3
_START_S = 60.0
_WORDS = ("def", "return", "self", "import", "for", "in", "if", "not", "None", "True")


@dataclass(slots=True)
class Routed:
    """A pair and its router. `command`: without the port."""

    name: str
    servers: tuple[Server, Server]
    command: list[str]
    first_ms: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self, log: Path) -> Iterator[str]:
        """The router's URL. Raises `BatonError` if it does not answer in time."""
        for server in self.servers:
            server.signal(signal.SIGCONT)
        port = free_port()
        with log.open("ab") as out:
            process = subprocess.Popen([*self.command, "--port", str(port)], stdout=out, stderr=out)
        try:
            asyncio.run(_await_model(f"http://127.0.0.1:{port}"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
            for server in self.servers:
                server.signal(signal.SIGSTOP)


async def _await_model(url: str) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        with contextlib.suppress(BatonError, aiohttp.ClientError):
            await first_token_s(url, "def main(", 4)
            return
        await asyncio.sleep(0.2)
    raise BatonError(f"the router at {url} answers no request")


async def first_token_s(url: str, prompt: str, num: int) -> float:
    """Seconds to the first event with text. Raises `BatonError` if there is none."""
    body = {"model": str(MODEL), "prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True}
    found = 0.0
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        began = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.content:
                if (
                    not found
                    and line.startswith(b"data: {")
                    and (json.loads(line[6:]).get("choices") or [{}])[0].get("text")
                ):
                    found = time.perf_counter() - began
            if response.status != 200 or not found:
                raise BatonError(f"{url} answered {response.status} without a token")
    return found


async def _ask(url: str, num_words: int, num_requests: int, rng: random.Random) -> list[float]:
    found = []
    for _ in range(WARM_UP + num_requests):
        prompt = " ".join(rng.choice(_WORDS) for _ in range(num_words))
        found.append(1e3 * await first_token_s(url, prompt, 8))
    return found[WARM_UP:]


def command(
    sglang_router: Annotated[str, typer.Option(metavar="PYTHON", help="Of an environment with sglang-router.")],
    words: Annotated[int, typer.Option(help="Words of a prompt.")] = 100,
    num_requests: Annotated[int, typer.Option(help="Requests in each turn.")] = 15,
    num_turns: Annotated[int, typer.Option(help="Turns of each pair.")] = 3,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the logs here.")] = None,
) -> None:
    """Time to first token of both, and the ratio of each turn."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder, bootstrap = log_dir or Path(temporary), free_port()
        folder.mkdir(parents=True, exist_ok=True)
        configs = pair_configs(folder, both=PAIR, settings={"lease": 60.0}) + own_configs("mooncake_tcp", (), bootstrap)
        with serve(folder, configs, MODEL) as (prefill, decode, mooncake_p, mooncake_d):
            own = ["--engine", "sglang", "--prefill", prefill.url, "--decode", decode.url, "--tokenizer", str(MODEL)]
            own += ["--keys", str(folder / "keys"), "--max-local-prefill-length", "0"]
            theirs = ["--pd-disaggregation", "--policy", "round_robin", "--prefill", mooncake_p.url, str(bootstrap)]
            theirs += ["--decode", mooncake_d.url, "--host", "127.0.0.1", "--prometheus-port", str(free_port())]
            routed = [
                Routed("Baton", (prefill, decode), [sys.executable, "-m", "baton.cli", "router", *own]),
                Routed(
                    "sglang-router",
                    (mooncake_p, mooncake_d),
                    [sglang_router, "-m", "sglang_router.launch_router", *theirs],
                ),
            ]
            for server in (mooncake_p, mooncake_d, prefill, decode):
                server.signal(signal.SIGSTOP)
            for turn in range(num_turns):
                for one in routed:
                    with one.running(folder / f"{one.name}.log") as url:
                        found = asyncio.run(_ask(url, words, num_requests, random.Random(turn)))
                    one.first_ms.append(statistics.median(found))
                    print(
                        f"turn {turn}: {one.name} {one.first_ms[-1]:.1f} ms ({min(found):.1f} to {max(found):.1f})",
                        flush=True,
                    )
    ratios = sorted(ours / others for ours, others in zip(*(one.first_ms for one in routed), strict=True))
    print(f"Baton over sglang-router: {statistics.median(ratios):.2f} ({_range(ratios)})")


def _range(ratios: Sequence[float]) -> str:
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"


if __name__ == "__main__":
    typer.run(command)
