"""Cause six faults in real deployments, and print what the dashboard shows for each in Chromium.

    python -m tools.browser.operator_hour [FAULT...]

The faults of docs/operations.md: dead-prefill, full-decode, slow-network, wrong-drafter, other-key, nothing-handed-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import torch
import typer
from safetensors.torch import load_file, save_file

from baton.bench.client import stream_completion
from baton.deployment import Deployment
from baton.errors import BatonError
from tools.browser.chromium import Tab, browser

_MODEL, _HEAD = "models/baton-demo-llama", "models/baton-demo-eagle3"
_TEXT = Path("src/baton/engine/core.py")
_CLIENTS = 4
_SHOWN = {
    "alarms": "document.getElementById('alarms').innerText",
    "routes": "document.getElementById('because').innerText",
    "engines": "document.querySelector('#engines tbody').innerText",
    "in flight": "document.getElementById('stages').innerText",
    "recoveries": "document.getElementById('recoveries').innerText",
    "errors": "document.getElementById('errors').innerText.split('\\n').slice(0, 2).join(' ')",
    "acceptance": "document.querySelector('#acceptance tbody')?.innerText",
}


def _speculation(head: str) -> str:
    return json.dumps({"method": "eagle3", "model": head, "num_speculative_tokens": 3, "draft_kv": "prefer"})


class OneOtherDrafter(Deployment):
    """The last decode engine has a drafter with random weights."""

    other = ""

    def _spawn(self, name: str, arguments: list[str]) -> object:  # type: ignore[override]
        if name == "decode-1":
            arguments = [_speculation(self.other) if one == _speculation(_HEAD) else one for one in arguments]
        return super()._spawn(name, arguments)


@contextlib.contextmanager
def _random_head() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        head = Path(shutil.copytree(_HEAD, Path(folder) / "head"))
        generator = torch.Generator().manual_seed(0)
        for file in head.glob("*.safetensors"):
            tensors = {
                name: torch.randn(one.shape, generator=generator).mul(one.float().std()).to(one.dtype)
                if one.is_floating_point()
                else one
                for name, one in load_file(file).items()
            }
            save_file(tensors, file, metadata={"format": "pt"})
        yield str(head)


@contextlib.asynccontextmanager
async def _load(url: str, max_tokens: int = 24) -> AsyncIterator[None]:
    """Requests of a few hundred tokens from several clients, until the block ends."""
    text, ended = _TEXT.read_text(), asyncio.Event()

    async def client(number: int) -> None:
        at = 97 * number
        async with aiohttp.ClientSession() as session:
            while not ended.is_set():
                at = (at + 331) % (len(text) - 2000)
                body = {"prompt": text[at : at + 700], "max_tokens": max_tokens, "temperature": 0.0}
                try:
                    await stream_completion(session, url, body)
                except (BatonError, RuntimeError, aiohttp.ClientError):
                    await asyncio.sleep(0.2)

    clients = [asyncio.create_task(client(number)) for number in range(_CLIENTS)]
    try:
        yield
    finally:
        ended.set()
        await asyncio.gather(*clients)


async def _look(up: Deployment, cause: Callable[[], None], until: str, max_tokens: int = 24) -> dict[str, str]:
    """Cause a fault under load, and wait until the page shows it. `until`: a JavaScript expression."""
    async with _load(up.url, max_tokens), browser() as tab:
        await tab.open(f"{up.url}/dashboard")
        await tab.until("document.querySelectorAll('#requests tbody tr').length > 8")
        cause()
        await tab.until(until)
        return await _shown(tab)


async def _shown(tab: Tab) -> dict[str, str]:
    await asyncio.sleep(1.5)
    found = {name: str(await tab.value(expression)) for name, expression in _SHOWN.items()}
    return {name: " | ".join(text.split("\n")) for name, text in found.items()}


def _up(
    prefill: int = 1,
    decode: int = 1,
    flags: Sequence[str] = (),
    router: Sequence[str] = (),
    transport: str | None = None,
) -> Deployment:
    engine = ["--speculative-config", _speculation(_HEAD), *flags]
    return Deployment(_MODEL, prefill, decode, engine_flags=engine, router_flags=router, kv_transport=transport)


def _has(element: str, text: str) -> str:
    return f"document.getElementById('{element}')?.innerText.includes('{text}')"


def dead_prefill() -> dict[str, str]:
    with _up() as up:
        shown = _has("alarms", "cannot be used") + " && " + _has("because", "no prefill engine answered")
        return asyncio.run(_look(up, lambda: up.kill("prefill-0"), shown))


def full_decode() -> dict[str, str]:
    with _up(flags=["--kv-cache-memory", "3M", "--max-num-seqs", "4"]) as up:
        shown = "[...document.querySelectorAll('#engines meter')].some(one => one.value > 0.6)"
        return asyncio.run(_look(up, lambda: None, shown, max_tokens=200))


def slow_network() -> dict[str, str]:
    with _up(transport="faulty+shm://?fault=delay&delay_s=0.5") as up:
        return asyncio.run(_look(up, lambda: None, _has("stages", "handoff")))


def wrong_drafter() -> dict[str, str]:
    with _random_head() as head:
        OneOtherDrafter.other = head
        flags = ["--speculative-config", _speculation(_HEAD)]
        with OneOtherDrafter(_MODEL, 1, 2, engine_flags=flags) as up:
            return asyncio.run(_look(up, lambda: None, _has("alarms", "acceptance of")))


def other_key() -> dict[str, str]:
    with _up(router=["--ticket-life", "1"]) as up, tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)

        def restart() -> None:
            router = up._child("router")
            place = router.arguments.index("--ticket-key-file") + 1
            router.arguments[place] = str(key)
            up.restart("router")

        return asyncio.run(_look(up, restart, _has("errors", "ticket")))


def nothing_handed_off() -> dict[str, str]:
    with _up(router=["--max-local-prefill-length", "4000"]) as up:
        return asyncio.run(_look(up, lambda: None, _has("alarms", "was handed off")))


FAULTS: dict[str, Callable[[], dict[str, str]]] = {
    "dead-prefill": dead_prefill,
    "full-decode": full_decode,
    "slow-network": slow_network,
    "wrong-drafter": wrong_drafter,
    "other-key": other_key,
    "nothing-handed-off": nothing_handed_off,
}


def main(faults: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None) -> None:
    """Cause faults, and print what the dashboard shows."""
    for name in faults or list(FAULTS):
        print(f"== {name}")
        for what, text in FAULTS[name]().items():
            print(f"{what}: {text[:700]}", flush=True)


if __name__ == "__main__":
    typer.run(main)
