"""Does the alarm on acceptance name a decode engine whose drafter has other weights, and no healthy one?

    python -m benchmarks.faults.wrong_drafter [--healthy 10000] [--broken-runs 3] [--noise 1.0]

Real deployments of one prefill and two decode engines, with prompts of many lengths, some of which are not handed off.
First the drafter of `decode-1` gets random weights of the same size: how many of its requests until `/status` names it?
Then all drafters are right, and `/status` is asked throughout: it must never have an alarm on acceptance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
import typer
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.scrape import get_json

_TEXT = Path("src/baton/engine/core.py")
_ROUTER = ["--max-local-prefill-length", "64"]
_LENGTHS = (80, 150, 400, 700, 900)  # of prompts, in characters
_CLIENTS, _EVERY_S, _LIMIT = 8, 0.1, 2000
_PARTLY_LIMIT = 800


def speculation(head: str) -> str:
    """The demo's drafter with the weights of `head`."""
    return json.dumps({**SPECULATIVE, "model": head, "draft_kv": "prefer"})


class OneOtherDrafter(Deployment):
    """Its last decode engine has the drafter `other`."""

    other = ""

    def _spawn(self, name: str, arguments: list[str]) -> object:  # type: ignore[override]
        if name == "decode-1":
            healthy = speculation(str(SPECULATIVE["model"]))
            arguments = [speculation(self.other) if one == healthy else one for one in arguments]
        return super()._spawn(name, arguments)


@contextlib.contextmanager
def random_head(noise: float = 1.0) -> Iterator[str]:
    """A copy of the demo's drafter whose weights are partly replaced by random ones of the same variance."""
    with tempfile.TemporaryDirectory() as folder:
        head = Path(shutil.copytree(str(SPECULATIVE["model"]), Path(folder) / "head"))
        generator = torch.Generator().manual_seed(0)
        for file in head.glob("*.safetensors"):
            tensors = {
                name: one.float()
                .lerp(torch.randn(one.shape, generator=generator) * one.float().std(), noise)
                .to(one.dtype)
                if one.is_floating_point()
                else one
                for name, one in load_file(file).items()
            }
            save_file(tensors, file, metadata={"format": "pt"})
        yield str(head)


@contextlib.contextmanager
def one_other_drafter(noise: float = 1.0) -> Iterator[Deployment]:
    """One prefill and two decode engines, the second with random weights in its drafter."""
    with random_head(noise) as head:
        OneOtherDrafter.other = head
        flags = ["--speculative-config", speculation(str(SPECULATIVE["model"]))]
        with OneOtherDrafter(str(TARGET), 1, 2, engine_flags=flags, router_flags=_ROUTER) as up:
            yield up


@contextlib.asynccontextmanager
async def _load(url: str) -> AsyncIterator[None]:
    """Short requests from several clients until the block ends."""
    text, ended = _TEXT.read_text(), asyncio.Event()

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        at = 97 * number
        while not ended.is_set():
            at = (at + 331) % (len(text) - 2000)
            body = {"prompt": text[at : at + _LENGTHS[at % len(_LENGTHS)]], "max_tokens": 16, "temperature": 0.0}
            await stream_completion(session, url, body)

    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(client(number, session)) for number in range(_CLIENTS)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*clients)


def _num_requests(acceptance: Mapping[str, Any], decode: str = "") -> int:
    """Requests that were compared, on one decode engine or all."""
    return sum(group["num_requests"] for group in acceptance["groups"] if decode in ("", group["decode"]))


async def until_named(url: str) -> tuple[int, list[str]]:
    """How many requests of `decode-1` had ended when `/status` first had an alarm, and its lines."""
    async with _load(url), aiohttp.ClientSession() as session:
        while True:
            acceptance = (await get_json(session, f"{url}/status"))["acceptance"]
            count = _num_requests(acceptance, "decode-1")
            if acceptance["alarms"] or count > _LIMIT:
                return count, acceptance["alarms"]
            await asyncio.sleep(_EVERY_S)


async def healthy_alarms(url: str, num_requests: int) -> tuple[int, int, list[str]]:
    """Requests that were compared, comparisons, and all alarms that were seen meanwhile."""
    seen: dict[str, None] = {}
    async with _load(url), aiohttp.ClientSession() as session:
        with tqdm(total=num_requests, unit="request", disable=None) as bar:
            while True:
                acceptance = (await get_json(session, f"{url}/status"))["acceptance"]
                seen |= dict.fromkeys(acceptance["alarms"])
                count = _num_requests(acceptance)
                bar.update(count - bar.n)
                if count >= num_requests:
                    return count, acceptance["num_comparisons"], list(seen)
                await asyncio.sleep(_EVERY_S)


def main(
    healthy: Annotated[int, typer.Option(help="Requests without a fault.")] = 10_000,
    broken_runs: Annotated[int, typer.Option(help="Deployments with a wrong drafter.")] = 3,
    noise: Annotated[float, typer.Option(help="How much of the wrong weights is random.")] = 1.0,
) -> None:
    """Print how soon the alarm came, and whether it came without a cause. Exit status 1 if it did not do its work."""
    failed = False
    for _ in range(broken_runs):
        with one_other_drafter(noise) as up:
            count, alarms = asyncio.run(until_named(up.url))
        named = bool(alarms) and all(line.startswith("acceptance of decode-1 is too low") for line in alarms)
        failed |= not named or count > (100 if noise == 1.0 else _PARTLY_LIMIT)
        print(f"wrong drafter: {'named' if named else 'NOT named'} after {count} of its requests: {alarms}", flush=True)
    if healthy:
        flags = ["--speculative-config", speculation(str(SPECULATIVE["model"]))]
        with Deployment(str(TARGET), 1, 2, engine_flags=flags, router_flags=_ROUTER) as up:
            count, comparisons, alarms = asyncio.run(healthy_alarms(up.url, healthy))
        failed |= bool(alarms)
        print(f"healthy: {len(alarms)} alarms in {count} requests, {comparisons} comparisons: {alarms}", flush=True)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
