"""Cause six faults in real deployments, and print what the dashboard shows for each in Chromium.

    python -m tools.browser.operator_hour [FAULT...]

The faults of docs/operations.md: dead-prefill, full-decode, slow-network, wrong-drafter, other-key, nothing-handed-off;
and `none`: a healthy deployment. Exit status 1 if the page's alarms do not name the fault, or name another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import aiohttp
import typer

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.errors import BatonError
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.faults.wrong_drafter import one_other_drafter, speculation
from tools.browser.chromium import Tab, browser

_TEXT = Path("src/baton/engine/core.py")
_CLIENTS = 4
_HEALTHY_S, _LIMIT_S = 20.0, 300.0
_SHOWN = {
    "alarms": "document.getElementById('alarms').innerText",
    "routes": "document.getElementById('because').innerText",
    "engines": "document.querySelector('#engines tbody').innerText",
    "in flight": "document.getElementById('stages').innerText",
    "recoveries": "document.getElementById('recoveries').innerText",
    "errors": "document.getElementById('errors').innerText.split('\\n').slice(0, 2).join(' ')",
    "acceptance": "document.querySelector('#acceptance tbody')?.innerText",
}
_ALARMS = "[...document.querySelectorAll('#alarms .alarm')].map(one => one.innerText)"


@contextlib.asynccontextmanager
async def _load(url: str, max_tokens: int) -> AsyncIterator[None]:
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


def _up(flags: Sequence[str] = (), router: Sequence[str] = (), transport: str | None = None) -> Deployment:
    engine = ["--speculative-config", speculation(str(SPECULATIVE["model"])), *flags]
    return Deployment(str(TARGET), 1, 1, engine_flags=engine, router_flags=router, kv_transport=transport)


def _restart_with_other_key(up: Deployment) -> None:
    """The router signs with a key that the engines do not know."""
    router = up._child("router")
    with TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
        router.arguments[router.arguments.index("--ticket-key-file") + 1] = str(key)
        up.restart("router")


@dataclass(frozen=True, slots=True)
class Fault:
    """`alarm`: part of the line that names it; empty: there must be none. `cause`: what breaks a deployment that
    runs. `effect`: part of a line that may follow."""

    alarm: str
    start: Callable[[], AbstractContextManager[Deployment]]
    cause: Callable[[Deployment], None] = lambda up: None
    max_tokens: int = 24
    effect: str = "(none)"


FAULTS = {
    "none": Fault("", _up),
    "dead-prefill": Fault("(prefill) cannot be used", _up, lambda up: up.kill("prefill-0")),
    "full-decode": Fault(
        "decode engine decode-0 is full",
        lambda: _up(["--kv-cache-memory", "3M", "--max-num-seqs", "4"]),
        max_tokens=400,
    ),
    "slow-network": Fault("handoffs are slow", lambda: _up(transport="faulty+shm://?fault=delay&delay_s=0.5")),
    "wrong-drafter": Fault("acceptance of decode-1 is too low", one_other_drafter),
    "other-key": Fault("refuses this router's tickets", _up, _restart_with_other_key, effect="requests failed"),
    "nothing-handed-off": Fault("was handed off", lambda: _up(router=["--max-local-prefill-length", "4000"])),
}


async def _look(up: Deployment, fault: Fault) -> tuple[list[str], dict[str, str]]:
    """Cause a fault under load, and wait until an alarm names it. Returns the alarms, and what else the page shows."""
    async with _load(up.url, fault.max_tokens), browser() as tab:
        await tab.open(f"{up.url}/dashboard")
        await tab.until("document.querySelectorAll('#requests tbody tr').length > 8")
        fault.cause(up)
        began = time.monotonic()
        alarms: list[str] = []
        limit_s = _LIMIT_S if fault.alarm else _HEALTHY_S
        while not any(fault.alarm in line for line in alarms) and time.monotonic() - began < limit_s:
            await asyncio.sleep(0.1)
            alarms = list(await tab.value(_ALARMS))
        print(f"seen after {time.monotonic() - began:.1f} s", flush=True)
        return alarms, await _shown(tab)


async def _shown(tab: Tab) -> dict[str, str]:
    await asyncio.sleep(1.5)
    found = {name: str(await tab.value(expression)) for name, expression in _SHOWN.items()}
    return {name: " | ".join(text.split("\n")) for name, text in found.items()}


def main(faults: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None) -> None:
    """Cause faults, and print what the dashboard shows."""
    failed = False
    for name in faults or list(FAULTS):
        print(f"== {name}", flush=True)
        fault = FAULTS[name]
        with fault.start() as up:
            alarms, shown = asyncio.run(_look(up, fault))
        others = [line for line in alarms if not (fault.alarm and fault.alarm in line) and fault.effect not in line]
        failed |= bool(others) or bool(fault.alarm and not alarms)
        for what, text in shown.items():
            print(f"{what}: {text[:700]}", flush=True)
        if others:
            print(f"OTHER ALARMS: {others}", flush=True)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
