"""One of the two legs is aborted at a random moment, on P or on D: the other ends well, and no page is kept."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, request_digest, sign_ticket
from baton.router.clients.engine_client import BatonClient, new_session
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import EngineInfo, GenerateRequest, HandoffParams, Mode, TokenChunk
from benchmarks.deployment import BreakableDeployment
from tests.e2e.test_aborts import await_idle, resident_bytes

MODEL = "models/baton-demo-llama"
FLAGS = ["--batch-invariant", "--max-num-batched-tokens", "64", "--kv-cache-memory", str(32 * 2**20)]
NUM_PER_SIDE = 50
MAX_CONCURRENT = 6
MAX_TOKENS = 24
# The longest wait of a leg whose other leg never reached P; of both legs, if both come.
TICKET_LIFE_S, LONG_LIFE_S = 6, 60
MAX_GROWTH_BYTES = 64 * 2**20
pytestmark = pytest.mark.usefixtures("forks")


async def read(client: BatonClient, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(request)]


class Pair:
    """Acts as the router of one P and one D."""

    def __init__(self, clients: dict[str, BatonClient], infos: dict[str, EngineInfo], key: bytes, mode: Mode) -> None:
        self.clients, self.infos, self.key, self.mode = clients, infos, key, mode

    def requests(self, name: str, prompt: list[int], life_s: float) -> dict[str, GenerateRequest]:
        p, d = self.infos["prefill"], self.infos["decode"]
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        expiry = time.monotonic() + life_s  # for every engine on this host
        signed = sign_ticket(
            self.key, Ticket.between(p, d, self.mode, request_digest(prompt, params), (expiry, expiry))
        )
        return {
            leg: msgspec.structs.replace(request, handoff=HandoffParams(role=leg, ticket=signed))  # type: ignore[arg-type]
            for leg in ("prefill", "decode")
        }

    async def run(self, name: str, prompt: list[int], leave: str | None, delay_s: float) -> dict[str, list[TokenChunk]]:
        """Run both legs; the one named `leave` is aborted after `delay_s`."""
        requests = self.requests(name, prompt, LONG_LIFE_S if leave is None else TICKET_LIFE_S)
        tasks = {leg: asyncio.create_task(read(self.clients[leg], requests[leg])) for leg in requests}
        if leave is not None:
            await asyncio.sleep(delay_s)
            tasks[leave].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tasks[leave]
        return {leg: await asyncio.wait_for(task, 60) for leg, task in tasks.items() if leg != leave}


@pytest.fixture(scope="module")
def deployment() -> Iterator[BreakableDeployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with BreakableDeployment(MODEL, engine_flags=FLAGS, router=False) as deployment:
            yield deployment


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seed"), [("push", 23), ("pull", 24)], ids=["push", "pull"])
async def test_a_leg_that_is_left_leaves_nothing(mode: Mode, seed: int, deployment: BreakableDeployment) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 2048) for _ in range(rng.choice((5, 64, 200, 600)))] for _ in range(2 * NUM_PER_SIDE)]
    sides = ["prefill", "decode"] * NUM_PER_SIDE
    async with new_session() as session, aiohttp.ClientSession() as plain:
        urls = {"prefill": deployment.prefill_urls[0], "decode": deployment.decode_urls[0]}
        clients = {leg: BatonClient(session, url, RouterTimers()) for leg, url in urls.items()}
        infos = {leg: await client.info() for leg, client in clients.items()}
        pair = Pair(clients, infos, load_or_create_key(deployment.ticket_key_file), mode)
        before = [tokens(await pair.run(f"b{i}", prompts[i], None, 0.0)) for i in range(6)]
        for i in range(12):  # every buffer reaches its size before memory is measured
            await pair.run(f"w{i}", [rng.randrange(3, 2048) for _ in range(600)], None, 0.0)
        resident = {name: resident_bytes(pid) for name, pid in deployment.pids.items()}
        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(index: int) -> tuple[str, list[TokenChunk]]:
            async with slots:
                side, delay_s = sides[index], random.Random(index).uniform(0.0, 0.15)
                (chunks,) = (await pair.run(f"a{index}", prompts[index], side, delay_s)).values()
                return side, chunks

        ends = await asyncio.gather(*(one(index) for index in range(len(prompts))))
        await await_idle(plain, deployment)
        unheard = 0
        for side, chunks in ends:
            last = chunks[-1] if chunks else None
            if side == "decode":
                assert last is None or last.finish_reason != "stop", last
            elif last is not None and last.error is not None and last.error.startswith("handoff_timeout"):
                # P never saw its leg, which was aborted before it was sent: D's leg ends with the ticket.
                unheard += 1
            else:
                # D still has its client: it continues from what it has, or computes everything itself.
                assert sum(len(chunk.token_ids) for chunk in chunks) == MAX_TOKENS, last
        assert unheard < NUM_PER_SIDE // 2
        after = [tokens(await pair.run(f"c{i}", prompts[i], None, 0.0)) for i in range(6)]
        assert after == before
        await await_idle(plain, deployment)
        assert deployment.ended() == {}
        growth = {name: resident_bytes(pid) - resident[name] for name, pid in deployment.pids.items()}
        assert max(growth.values()) < MAX_GROWTH_BYTES, growth


def tokens(legs: dict[str, list[TokenChunk]]) -> list[int]:
    """D's stream, which begins at output position 0 with P's first token."""
    first = [token for chunk in legs["prefill"] for token in chunk.token_ids]
    found = [token for chunk in legs["decode"] for token in chunk.token_ids]
    assert found[:1] == first
    assert len(found) == MAX_TOKENS
    return found
