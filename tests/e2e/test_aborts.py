"""Clients that leave at any moment leave no page, no handoff and no memory behind, on either engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from benchmarks.deployment import BreakableDeployment

MODEL = "models/baton-demo-llama"
# So few pages that aborted requests fill the pool many times: one lost page in ten would stop the test. Also, all pages
# are soon touched, so that growth of the processes does not come from the pool.
KV_BYTES = 32 * 2**20
FLAGS = ["--batch-invariant", "--max-num-batched-tokens", "64", "--kv-cache-memory", str(KV_BYTES)]
NUM_ABORTS = 100
MAX_CONCURRENT = 8
PREFILL_TOKENS = 600  # ten steps of 64 tokens: long enough to abort in the middle
DRAIN_LIMIT_S = 60.0
MAX_GROWTH_BYTES = 64 * 2**20
IDLE = ("num_running", "num_waiting", "num_handoffs", "num_referenced_pages", "num_quarantined_pages")
pytestmark = pytest.mark.usefixtures("forks")


@dataclass(frozen=True, slots=True)
class Abort:
    """One request to abort: after `chunks` events, or if that is None, `delay_s` after it was sent."""

    prompt: list[int]
    delay_s: float
    chunks: int | None

    def body(self, mode: str) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "kv_mode": mode,
            # So many that no request ends before its client's disconnection is noticed.
            "max_tokens": 3000,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }


def make_aborts(seed: int) -> list[Abort]:
    """A third in prefill, a third in decode, a third at any time."""
    rng = random.Random(seed)
    aborts = []
    for number in range(NUM_ABORTS):
        kind = number % 3
        length = PREFILL_TOKENS if kind == 0 else rng.randint(1, 80)
        prompt = [rng.randrange(3, 2048) for _ in range(length)]
        aborts.append(Abort(prompt, rng.uniform(0.0, 0.06), rng.randint(1, 12) if kind == 1 else None))
    rng.shuffle(aborts)
    return aborts


async def send_and_leave(
    session: aiohttp.ClientSession, url: str, abort: Abort, mode: str
) -> Literal["prefill", "decode"]:
    """Returns the phase in which the client left: "prefill" if it had no token yet."""
    num_events = 0

    async def read() -> None:
        nonlocal num_events
        async with session.post(f"{url}/v1/completions", json=abort.body(mode)) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                assert b'"error"' not in line, line
                num_events += line.startswith(b"data: ")
                if abort.chunks is not None and num_events >= abort.chunks:
                    response.close()  # close the connection without reading on
                    return
            raise AssertionError("the request ended before the client left")

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), abort.delay_s if abort.chunks is None else 60.0)
    return "decode" if num_events else "prefill"


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], mode: str) -> list[int]:
    body = {
        "prompt": prompt,
        "kv_mode": mode,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        tokens: list[int] = (await response.json())["choices"][0]["token_ids"]
    assert len(tokens) == 24
    return tokens


async def get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as response:
        assert response.status == 200, await response.text()
        value: dict[str, Any] = await response.json()
        return value


async def await_idle(session: aiohttp.ClientSession, deployment: BreakableDeployment) -> None:
    """Wait until no engine holds anything for any request."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DRAIN_LIMIT_S
    while True:
        loads = {url: await get(session, f"{url}/inference/v1/load") for url in deployment.engine_urls}
        if not any(load[name] for load in loads.values() for name in IDLE):
            return
        assert loop.time() < deadline, f"still held: {loads}"
        await asyncio.sleep(0.05)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory: it has ended")


def expected_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 2048) for _ in range(length)] for length in (1, 16, 47, 130, PREFILL_TOKENS)]


@pytest.fixture(scope="module")
def deployment() -> Iterator[BreakableDeployment]:
    """Warmed up: every page and buffer was used before a test measures memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with BreakableDeployment(MODEL, engine_flags=FLAGS, router_flags=["--allow-mode-override"]) as deployment:
            asyncio.run(warm_up(deployment))
            yield deployment


async def warm_up(deployment: BreakableDeployment) -> None:
    rng = random.Random(9)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for mode in ("push", "pull"):
            prompts = [[rng.randrange(3, 2048) for _ in range(PREFILL_TOKENS)] for _ in range(MAX_CONCURRENT)]
            await asyncio.gather(*(complete(session, deployment.url, prompt, mode) for prompt in prompts))
        await await_idle(session, deployment)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seed"), [("push", 17), ("pull", 18)], ids=["push", "pull"])
async def test_aborted_requests_leave_nothing(mode: str, seed: int, deployment: BreakableDeployment) -> None:
    prompts = expected_prompts(seed + 100)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=90)) as session:
        url = deployment.url
        before = [await complete(session, url, prompt, mode) for prompt in prompts]
        await await_idle(session, deployment)
        handoffs_before = (await get(session, f"{url}/status"))["handoffs"]
        pids = deployment.pids
        resident = {name: resident_bytes(pid) for name, pid in pids.items()}

        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(abort: Abort) -> Literal["prefill", "decode"]:
            async with slots:
                return await send_and_leave(session, url, abort, mode)

        left_in = Counter(await asyncio.gather(*(one(abort) for abort in make_aborts(seed))))
        await await_idle(session, deployment)

        # The requests were really aborted, in both phases, and none failed or completed.
        assert left_in.total() == NUM_ABORTS
        assert min(left_in["prefill"], left_in["decode"]) >= NUM_ABORTS // 5, left_in
        status = await get(session, f"{url}/status")
        handoffs = {k: status["handoffs"][k] - handoffs_before[k] for k in handoffs_before if k != "failures"}
        assert status["handoffs"]["failures"] == {}, handoffs
        assert handoffs["active"] == handoffs["failed"] == handoffs["completed"] == 0, handoffs
        # A slow router begins few whose client leaves before the first token.
        assert handoffs["aborted"] == handoffs["started"] >= NUM_ABORTS // 4, handoffs
        assert all(engine["healthy"] and engine["num_inflight"] == 0 for engine in status["engines"])

        assert deployment.ended() == {}
        assert deployment.pids == pids
        after = [await complete(session, url, prompt, mode) for prompt in prompts]
        assert after == before
        await await_idle(session, deployment)
        growth = {name: resident_bytes(pid) - resident[name] for name, pid in pids.items()}
        assert max(growth.values()) < MAX_GROWTH_BYTES, growth
        print(f"{mode}: {dict(left_in)} {handoffs} growth {growth}")
