"""Real SGLang servers on this machine's CPU, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, mint
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.parent import die_with_parent
from baton.sglang.legs import prompt_digest
from baton.wire import SglangIdentity

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "models" / "baton-demo-llama"
SUPPORT = ROOT / "tests" / "sglang" / "support"
# These only end a hang. Starting takes 25 s on an idle machine, and minutes on a busy one.
LIMIT_S = 600.0
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "8192"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--disable-cuda-graph"),
]
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # It would compile small functions of the sampler and the drafter at the first request, for a minute.
    "TORCHDYNAMO_DISABLE": "1",
}
# On a decode server; SGLang's default registers memory with CUDA.
RETRACTION = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
# SGLang's attention in PyTorch has no path for drafts; the stand-in's has.
KERNELS = "baton_test_kernels = sgl_kernel.plugin:register\n"
Mode = Literal["push", "pull"]


@dataclass(slots=True)
class Server:
    """One server: all its processes are one session (setsid)."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=LIMIT_S) as answer:
            state: dict[str, Any] = json.load(answer)["internal_states"][0]
        return state

    def identity(self) -> SglangIdentity:
        return msgspec.convert(self.info()["baton"], SglangIdentity)

    def counts(self) -> dict[str, int]:
        """Handoffs by outcome."""
        found: dict[str, int] = self.info()["baton"]["counts"]
        return found

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Server
    decode: Server
    key: bytes

    def legs(self, prompt: Sequence[int], mode: Mode, life_s: float = LIMIT_S) -> dict[str, Any]:
        """What both legs' bodies have besides a request's own."""
        expiry = time.monotonic() + life_s  # for every server on this host
        p, d = self.prefill.identity(), self.decode.identity()
        ticket = Ticket.between(p, d, mode, prompt_digest(prompt), (expiry, expiry))
        room = int.from_bytes(ticket.transfer_id[:8], "big") >> 1 or 1
        return {"bootstrap_host": mint(self.key, ticket), "bootstrap_room": room}


@dataclass(frozen=True, slots=True)
class Config:
    """A server: SGLang's `flags` besides the common ones; `settings` of the plug-in, if it has it."""

    name: str
    flags: Sequence[str] = ()
    settings: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def serve(folder: Path, configs: Sequence[Config], model: Path = MODEL) -> Iterator[list[Server]]:
    """Start servers, and wait until all are ready; logs go into `folder`."""
    servers: list[Server] = []
    try:
        for config in configs:
            servers.append(_start(folder, config, model))
        for server in servers:
            _wait_ready(server)
        yield servers
    finally:
        for server in servers:
            server.signal(signal.SIGKILL)
            server.process.wait()


@contextlib.contextmanager
def serve_pair(
    folder: Path,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    both: Sequence[str] = (),
    model: Path = MODEL,
    alone: Sequence[str] | None = None,
) -> Iterator[tuple[Pair, Server | None]]:
    """One prefill and one decode server, and with `alone` also one that does both, with these flags. `settings`: the
    plug-in's."""
    make_keys(folder / "keys", ["P", "D"])
    key = load_or_create_key(ticket_key_file(folder / "keys"))
    backend = ["--disaggregation-transfer-backend", "baton", "--disaggregation-mode"]
    common = {"keys": str(folder / "keys"), "lease": 20.0} | (settings or {})
    configs = [
        Config("P", [*backend, "prefill", *both, *prefill], {"engine_id": "P", **common}),
        Config("D", [*backend, "decode", *RETRACTION, *both, *decode], {"engine_id": "D", **common}),
    ]
    if alone is not None:
        configs.append(Config("one", [*both, *alone]))
    with serve(folder, configs, model) as found:
        yield Pair(found[0], found[1], key), found[2] if alone is not None else None


def _start(folder: Path, config: Config, model: Path) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = [str(_announce(folder)), str(SUPPORT), str(ROOT / "src"), str(ROOT)]
    environment = {**os.environ, **ENVIRONMENT, **config.environment, "PYTHONPATH": os.pathsep.join(path)}
    if config.settings is not None:
        environment["BATON_SGLANG_CONFIG"] = json.dumps(config.settings)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS]
    log = folder / f"{config.name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port), *config.flags],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return Server(config.name, f"http://127.0.0.1:{port}", process, log)


def _announce(folder: Path) -> Path:
    """A folder for PYTHONPATH with the entry point that an installed Baton has."""
    found = folder / "entry" / "baton_serve-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-serve\nVersion: 0\n")
    (found / "entry_points.txt").write_text("[sglang.srt.plugins]\nbaton = baton.sglang:register\n" + KERNELS)
    return found.parent


def _wait_ready(server: Server) -> None:
    until = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError):
            server.info()
            return
        ended = server.process.poll() is not None
        assert not ended, f"{server.name} did not start:\n{server.log.read_text()[-4000:]}"
        assert time.monotonic() < until, f"{server.name} is not ready:\n{server.log.read_text()[-4000:]}"
        time.sleep(0.5)


async def ask(session: aiohttp.ClientSession, server: Server, prompt: Sequence[int], num: int, **more: Any) -> Any:
    """A greedy completion of `num` tokens, whatever they are: SGLang's answer."""
    sampling = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, **more}
    async with session.post(f"{server.url}/generate", json=body) as response:
        return await response.json()


async def handoff(
    session: aiohttp.ClientSession, pair: Pair, prompt: Sequence[int], num: int, mode: Mode, late: float = 0.0
) -> list[int]:
    """Send both legs at once (`late` > 0: decode that many seconds later; < 0: prefill). Returns the decode server's
    tokens, of which the first is the prefill server's."""
    legs = pair.legs(prompt, mode)

    async def leg(server: Server, wait: float) -> Any:
        await asyncio.sleep(max(wait, 0.0))
        return await ask(session, server, prompt, num, **legs)

    first, answer = await asyncio.gather(leg(pair.prefill, -late), leg(pair.decode, late))
    tokens: list[int] = answer["output_ids"]
    assert first["output_ids"] == tokens[:1], (first, answer)
    return tokens


def demo_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Text that the demo models know, cut to `lengths` tokens."""
    import argparse

    from tokenizers import Tokenizer

    text = Path(argparse.__file__).read_text()
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    rng = random.Random(seed)
    starts = [rng.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random ids that the demo models know."""
    rng = random.Random(seed)
    return [[rng.randrange(5, 2000) for _ in range(length)] for length in lengths]


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))


def wait_idle(*servers: Server) -> None:
    """Wait until no request holds a page of these servers."""
    until = time.monotonic() + LIMIT_S
    while busy := {server.name: used for server in servers if (used := _used(server))}:
        assert time.monotonic() < until, f"pages are held: {busy}"
        time.sleep(0.2)


def _used(server: Server) -> Any:
    with urllib.request.urlopen(f"{server.url}/v1/loads?include=all", timeout=LIMIT_S) as answer:
        loads = json.load(answer)["loads"]
    return [load for load in loads if load.get("num_running_reqs") or load.get("num_waiting_reqs")]
