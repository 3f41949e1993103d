"""The cost of disaggregation in SGLang on CPUs: one server against P/D over `baton` and over SGLang's `mooncake_tcp`.

    python tools/install_sglang.py python -m benchmarks.sglang.handoffs

Every round sends the same new prompt to all deployments, in changing order. The servers of the others are stopped
(SIGSTOP) meanwhile, since a scheduler of SGLang that has nothing to do spins. Ratios are taken within rounds.
Each deployment is asked without a router, as one would: both legs at once. With `baton` the client gets the prefill
server's first token; SGLang's own backends answer from the decode server alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import aiohttp
import typer

from baton.errors import BatonError
from baton.wire import Mode
from benchmarks.vllm.handoffs import Row, table
from benchmarks.vllm.legs import Answer
from testkit.sglang.servers import MODEL, RETRACTION, Config, Pair, Server, free_port, pair_configs, serve, ticket_key

WARM_UP = 2
VOCABULARY = (5, 2000)
TIMEOUT = aiohttp.ClientTimeout(total=300)
PAIR = ("--disable-radix-cache",)
Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Timed(Answer):
    """`prefilled`: when the prefill ended, if the server runs with `--enable-metrics`, else nan; `said`: when the last
    server said its first token. Both in seconds of the host's clock."""

    prefilled: float
    said: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """`bodies`: what each server is sent besides the prompt."""

    name: str
    servers: tuple[Server, ...]
    bodies: Callable[[Prompt], dict[str, Any]]

    async def ask(self, session: aiohttp.ClientSession, prompt: Prompt, num: int) -> Timed:
        more = self.bodies(prompt)
        answers = await asyncio.gather(*(stream(session, server, prompt, num, more) for server in self.servers))
        # A prefill server of SGLang's own backends says its token when the handoff has ended.
        times = list(answers[-1].times_s)
        times[0] = min(answer.times_s[0] for answer in answers)
        return Timed(answers[-1].token_ids, times, answers[0].prefilled, answers[-1].said)


async def stream(
    session: aiohttp.ClientSession, server: Server, prompt: Prompt, num: int, more: dict[str, Any]
) -> Timed:
    """A greedy completion, and when each token came. Raises `BatonError` if the server gave it up."""
    sampling = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True, **more}
    clock, started = time.time(), time.perf_counter()
    tokens: list[int] = []
    times: list[float] = []
    prefilled = math.nan
    async with session.post(f"{server.url}/generate", json=body) as response:
        async for line in response.content:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            finish = event.get("meta_info", {}).get("finish_reason") or {}
            if "error" in event or finish.get("type") == "abort":
                raise BatonError(f"{server.name}: {event.get('error') or finish}")
            tokens = event["output_ids"]
            prefilled = event["meta_info"].get("prefill_finished_time", prefilled)
            times += [time.perf_counter() - started] * (event["meta_info"]["completion_tokens"] - len(times))
    if not tokens:
        raise BatonError(f"{server.name} answered {response.status} without a token")
    return Timed(tokens, times, prefilled, clock + times[0])


async def rounds(deployments: Sequence[Deployment], length: int, num_rounds: int, num: int) -> dict[str, Row]:
    rows = {deployment.name: Row() for deployment in deployments}
    async for found in turns(deployments, length, num_rounds, num):
        for name, row in rows.items():
            row.add(found.get(name))
        expected = found.get(deployments[0].name)
        for name, answer in found.items():
            rows[name].num_other += expected is None or answer.token_ids != expected.token_ids
    return rows


async def turns(
    deployments: Sequence[Deployment], length: int, num_rounds: int, num: int
) -> AsyncIterator[dict[str, Timed]]:
    """Of each round the answers, by deployment. A failure is printed."""
    rng = random.Random(length)
    servers = {server.name: server for deployment in deployments for server in deployment.servers}
    # A server that is stopped for some seconds closes a kept connection just when the next request is written.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        for index in range(WARM_UP + num_rounds):
            prompt = [rng.randrange(*VOCABULARY) for _ in range(length)]
            order, found = list(deployments), dict[str, Timed]()
            rng.shuffle(order)
            for deployment in order:
                running = {server.name for server in deployment.servers}
                for name, server in servers.items():
                    server.signal(signal.SIGCONT if name in running else signal.SIGSTOP)
                try:
                    found[deployment.name] = await deployment.ask(session, prompt, num)
                except (BatonError, aiohttp.ClientError) as error:
                    print(f"{deployment.name}: {type(error).__name__}: {error}", flush=True)
            if index >= WARM_UP:
                yield found
    for server in servers.values():
        server.signal(signal.SIGCONT)


def own_configs(backend: str, flags: Sequence[str], port: int) -> list[Config]:
    """A pair with one of SGLang's own backends."""
    chosen = ["--disaggregation-transfer-backend", backend, "--disaggregation-bootstrap-port", str(port)]
    own = [*PAIR, *flags, *chosen]
    environment = {"MC_FORCE_TCP": "1"}
    return [
        Config(f"{backend}-P", [*own, "--disaggregation-mode", "prefill"], environment=environment),
        Config(f"{backend}-D", [*own, "--disaggregation-mode", "decode", *RETRACTION], environment=environment),
    ]


def room_at(port: int) -> dict[str, Any]:
    """What both legs' bodies have besides a request's own, for SGLang's own backends."""
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": secrets.randbits(62)}


def command(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")] = MODEL,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512",
    num_rounds: Annotated[int, typer.Option(help="Rounds for each length.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 24,
    flags: Annotated[str, typer.Option(help="Further arguments of every server.")] = "",
    log_dir: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write every time that was taken here.")] = None,
) -> None:
    """Time to first token and the gap to the second, of SGLang alone and with both transfer backends."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder = log_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        port, more = free_port(), flags.split()
        configs = [Config("one", [*PAIR, *more])]
        configs += pair_configs(folder, both=[*PAIR, *more], settings={"lease": 60.0})
        configs += own_configs("mooncake_tcp", more, port)
        with serve(folder, configs, model) as (one, prefill, decode, mooncake_p, mooncake_d):
            pair = Pair(prefill, decode, ticket_key(folder))
            legs = {mode: pair.minter(mode) for mode in get_args(Mode)}

            deployments = [Deployment("one SGLang", (one,), lambda _: {})]
            deployments += [Deployment(f"baton {mode}", (prefill, decode), made) for mode, made in legs.items()]
            deployments.append(Deployment("mooncake_tcp", (mooncake_p, mooncake_d), lambda _: room_at(port)))
            for length in map(int, lengths.split(",")):
                found = asyncio.run(rounds(deployments, length, num_rounds, max_tokens))
                results[str(length)] = {name: asdict(row) for name, row in found.items()}
                print(f"\n{length} tokens, {num_rounds} rounds, {max_tokens} tokens each:")
                print("\n".join(table(found, "one SGLang")), flush=True)
    if json_output is not None:
        json_output.write_text(json.dumps(results))


if __name__ == "__main__":
    typer.run(command)
