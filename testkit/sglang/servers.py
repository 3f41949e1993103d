"""Real SGLang servers on this machine's CPU, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from baton.handoff.protocol.ticket import Ticket, load_or_create_key, sign_ticket
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.sglang.legs import prompt_digest
from baton.wire import Mode, SglangIdentity
from benchmarks.vllm import servers as vllm_servers
from testkit.processes.launcher import Process
from testkit.sglang.launch import ROOT, start

MODEL = ROOT / "models" / "baton-demo-llama"
# These only end a hang. Starting takes 25 s on an idle machine, and minutes on a busy one.
LIMIT_S = 600.0
# On a decode server; SGLang's default registers memory with CUDA.
RETRACTION = ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
# What both legs' bodies have besides a request's own, for a prompt.
Legs = Callable[[Sequence[int]], dict[str, Any]]


@dataclass(slots=True)
class Server:
    """One server, or with `data_rank` one of its data-parallel ranks. All its processes are one session (setsid)."""

    name: str
    url: str
    process: Process
    log: Path
    data_rank: int | None = None

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=LIMIT_S) as answer:
            states: list[dict[str, Any]] = json.load(answer)["internal_states"]
        ranks = {state.get("baton", {}).get("data_parallel_rank"): state for state in states}
        return ranks[self.data_rank] if self.data_rank is not None else states[0]

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

    def legs(self, prompt: Sequence[int], mode: Mode) -> dict[str, Any]:
        """What both legs' bodies have besides a request's own."""
        return self.minter(mode)(prompt)

    def minter(self, mode: Mode) -> Legs:
        """As `legs`, for any prompts, with identities that are asked for once."""
        p, d = self.prefill.identity(), self.decode.identity()

        def legs(prompt: Sequence[int]) -> dict[str, Any]:
            expiry = time.monotonic() + LIMIT_S  # for every server on this host
            ticket = Ticket.between(p, d, mode, prompt_digest(prompt), (expiry, expiry))
            room = int.from_bytes(ticket.transfer_id[:8], "big") >> 1 or 1
            return {"bootstrap_host": sign_ticket(self.key, ticket), "bootstrap_room": room}

        return legs


@dataclass(frozen=True, slots=True)
class Config:
    """A server: SGLang's `flags` besides the common ones; `settings` of the plug-in, if it has it. `forked`: as in
    `launch.start`."""

    name: str
    flags: Sequence[str] = ()
    settings: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    forked: bool = True


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
    """`alone`: the flags of one server more, which does both. `settings`: the plug-in's."""
    configs = pair_configs(folder, prefill, decode, both, settings)
    if alone is not None:
        configs.append(Config("one", [*both, *alone]))
    with serve(folder, configs, model) as found:
        yield Pair(found[0], found[1], ticket_key(folder)), found[2] if alone is not None else None


def pair_configs(
    folder: Path,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    both: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
) -> list[Config]:
    """With keys in `folder`, also for two data-parallel ranks of each."""
    if not (folder / "keys").exists():
        make_keys(folder / "keys", ["P", "D", *(f"{name}_dp{rank}" for name in "PD" for rank in range(2))])
    backend = ["--disaggregation-transfer-backend", "baton", "--disaggregation-mode"]
    common = {"keys": str(folder / "keys"), "lease": 20.0} | (settings or {})
    return [
        Config("P", [*backend, "prefill", *both, *prefill], {"engine_id": "P", **common}),
        Config("D", [*backend, "decode", *RETRACTION, *both, *decode], {"engine_id": "D", **common}),
    ]


def ticket_key(folder: Path) -> bytes:
    return load_or_create_key(ticket_key_file(folder / "keys"))


def _start(folder: Path, config: Config, model: Path) -> Server:
    environment = dict(config.environment)
    if config.settings is not None:
        environment["BATON_SGLANG_CONFIG"] = json.dumps(config.settings)
    port, log = free_port(), folder / f"{config.name}.log"
    process = start(model, config.flags, environment, log, port, config.forked)
    return Server(config.name, f"http://127.0.0.1:{port}", process, log)


_PORTS = list(range(10_000, 32_000, 50))
random.SystemRandom().shuffle(_PORTS)


def free_port() -> int:
    """Each once, held as vLLM's are, and below those that the system hands out: SGLang takes others near it, by fixed
    steps."""
    while True:
        with contextlib.suppress(OSError):
            return vllm_servers.free_port(_PORTS.pop())


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
    if server.data_rank is not None:
        body["routed_dp_rank"] = server.data_rank
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


async def outcome(
    http: aiohttp.ClientSession, pair: Pair, prompt: Sequence[int], num: int, legs: Legs
) -> list[int] | str:
    """The decode server's tokens, or the error that it named. `legs`: made while both servers answered. As a router
    does, this ends the prefill leg of a decode leg that has failed: no decode server may ever ask for its pages."""
    more = legs(prompt)
    first = asyncio.ensure_future(ask(http, pair.prefill, prompt, num, **more))
    try:
        answer = await ask(http, pair.decode, prompt, num, **more)
    except aiohttp.ClientError as error:
        answer = f"connection: {type(error).__name__}"
    except asyncio.CancelledError:  # the client leaves
        first.cancel()
        raise
    good = "output_ids" in answer and answer["meta_info"]["finish_reason"]["type"] != "abort"
    if not good:
        first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    if isinstance(answer, str):
        return answer
    if "meta_info" not in answer:
        return f"error: {answer}"
    finish = answer["meta_info"]["finish_reason"]
    if finish["type"] == "abort":
        return f"abort: {finish['message']}"
    tokens: list[int] = answer["output_ids"]
    return tokens


def greedy(found: Sequence[Sequence[int]], num: int, model: Path = MODEL) -> list[list[int]]:
    """What transformers generates after each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.generation_config.eos_token_id = None
    with torch.inference_mode():
        outputs = [
            made.generate(torch.tensor([list(p)]), max_new_tokens=num, do_sample=False, pad_token_id=0) for p in found
        ]
    return [output[0, len(p) :].tolist() for output, p in zip(outputs, found, strict=True)]


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
    # A server closes connections that are idle for 5 s, maybe just when the next request is written.
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=LIMIT_S))


def wait_idle(*servers: Server) -> None:
    """Wait until no request holds a page of these servers."""
    until = time.monotonic() + LIMIT_S
    while busy := {server.name: used for server in servers if (used := _used(server))}:
        assert time.monotonic() < until, f"pages are held: {busy}"
        time.sleep(0.2)


def check_whole(*servers: Server) -> None:
    """Wait until each server is at rest: no attempt is left, and no token holds a page but those that its prefix cache
    can give up."""
    for server in servers:
        until = time.monotonic() + LIMIT_S
        while left := _left(server):
            assert time.monotonic() < until, f"{server.name} still has {left}"
            time.sleep(0.2)


def _left(server: Server) -> dict[str, int]:
    counts, load = server.counts(), _loads(server)[0]
    found = {name: counts[name] for name in ("outstanding", "quarantined")} | {"tokens": load["num_used_tokens"]}
    return {name: number for name, number in found.items() if number}


def _used(server: Server) -> Any:
    return [load for load in _loads(server) if load.get("num_running_reqs") or load.get("num_waiting_reqs")]


def _loads(server: Server) -> list[dict[str, Any]]:
    rank = "" if server.data_rank is None else f"&dp_rank={server.data_rank}"
    with urllib.request.urlopen(f"{server.url}/v1/loads?include=all{rank}", timeout=LIMIT_S) as answer:
        loads: list[dict[str, Any]] = json.load(answer)["loads"]
    return loads
