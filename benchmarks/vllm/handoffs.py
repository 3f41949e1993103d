"""The cost of disaggregation in vLLM on CPUs: one server against P/D over BatonConnector and vLLM's NIXL connectors.

    python -m benchmarks.vllm.handoffs --vllm-python $(python3 tools/install_vllm.py)/bin/python

Every round sends the same new prompt to all deployments, in changing order, and waits in between until their processes
sleep. Ratios are taken within rounds. vLLM's own connectors are measured "at their best" (not pinned to a core, and
improved by `benchmarks.vllm.peers`) and as shipped; as shipped they burn a core when idle, so they and the single
server run in turns (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import aiohttp
import typer

from baton.errors import BatonError
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.vllm.config import FirstStep
from baton.wire import Mode
from benchmarks.vllm.legs import Answer, Baton, Legs, NixlPull, NixlPush, Single
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, VllmServer, free_port, serve

MODEL = "models/baton-demo-llama"
SHIPPED_FLAGS = ("--no-enable-prefix-caching", "--block-size", "32", "--no-enable-log-requests")
FLAGS = (*SHIPPED_FLAGS, *ONE_PROCESS)
ROLES = (("P", "kv_producer"), ("D", "kv_consumer"))
PEERS = ("NixlConnector", "NixlPushConnector")
MODES: tuple[Mode, ...] = ("push", "pull")
WARM_UP = 2
# As shipped, vLLM's workers spin for a second after the last message.
SLEEP_S = 1.3
IDLE_AFTER_S, WINDOW_S = 2.0, 5.0
VOCABULARY = (3, 2000)
TIMEOUT = aiohttp.ClientTimeout(total=120)


@dataclass(frozen=True, slots=True)
class Deployment:
    name: str
    legs: Legs
    servers: tuple[VllmServer, ...]


@dataclass(slots=True)
class Row:
    """Milliseconds, one per round; nan if there was no answer. `second`: until the second token, when the handoff is
    over. `tpot`: vLLM's definition, (last - first) / (tokens - 1). `gaps`: of each answer, from token to token.
    `num_other`: answers that differ from the single server's.
    """

    ttft: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
    num_other: int = 0
    num_failed: int = 0

    def add(self, answer: Answer | None) -> None:
        """Add one round; None if it failed."""
        if answer is None:
            self.num_failed += 1
            for values in (self.ttft, self.second, self.tpot):
                values.append(math.nan)
            self.gaps.append([])
            return
        times = [1e3 * at for at in answer.times_s]
        self.ttft.append(times[0])
        self.second.append(times[1])
        self.tpot.append((times[-1] - times[0]) / (len(times) - 1))
        self.gaps.append([later - earlier for earlier, later in itertools.pairwise(times)])


def _transfer(connector: str, role: str, name: str, best: bool = False, **extra: Any) -> dict[str, Any]:
    config = {"kv_connector": connector, "kv_role": role, "engine_id": name, "kv_connector_extra_config": extra}
    if connector == "BatonConnector":
        return config | {"kv_connector_module_path": "baton.vllm"}
    config["kv_buffer_device"] = "cpu"
    return config | {"kv_connector_module_path": "benchmarks.vllm.peers"} if best else config


Deploy = Callable[[VllmServer, VllmServer], list[Deployment]]


def baton_servers(
    folder: Path, flags: Sequence[str] = (), first_step: FirstStep = "recompute"
) -> tuple[list[ServerConfig], Deploy]:
    """A prefill and a decode server, used with push and with pull."""
    keys = folder / f"keys-{first_step}"
    make_keys(keys, [name for name, _ in ROLES])
    key = load_or_create_key(ticket_key_file(keys))
    configs = []
    for name, role in ROLES:
        transfer = _transfer("BatonConnector", role, name, keys=str(keys), first_step=first_step)
        configs.append(ServerConfig(f"baton-{first_step}-{name}", (*FLAGS, *flags), transfer))
    note = "" if first_step == "recompute" else f", {first_step}"

    def deploy(p: VllmServer, d: VllmServer) -> list[Deployment]:
        return [Deployment(f"BatonConnector {m}{note}", Baton(p.url, d.url, key, m), (p, d)) for m in MODES]

    return configs, deploy


def nixl_servers(connector: str, best: bool, more: Sequence[str] = ()) -> tuple[list[ServerConfig], Deploy]:
    """A prefill and a decode server with one of vLLM's own connectors."""
    label = f"{connector} {'at its best' if best else 'as shipped'}"
    ports = [free_port(), free_port()]
    tag = label.replace(" ", "-")
    flags = (*(FLAGS if best else SHIPPED_FLAGS), *more)
    configs = []
    for (name, role), port in zip(ROLES, ports, strict=True):
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        if not best:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
        configs.append(
            ServerConfig(f"{tag}-{name}", flags, _transfer(connector, role, f"{tag}-{name}", best), environment)
        )

    def deploy(p: VllmServer, d: VllmServer) -> list[Deployment]:
        legs: Legs = NixlPull(p.url, d.url)
        if connector == "NixlPushConnector":
            legs = NixlPush(p.url, d.url, f"{tag}-P", ports[0])
        return [Deployment(label, legs, (p, d))]

    return configs, deploy


@contextlib.contextmanager
def serve_pair(
    python: str, model: str, folder: Path, configs: Sequence[ServerConfig], deploy: Deploy
) -> Iterator[list[Deployment]]:
    """Start a pair."""
    with serve(python, model, folder, configs) as (p, d):
        yield deploy(p, d)


def _resume(servers: Sequence[VllmServer], only: Sequence[VllmServer]) -> None:
    """`only` run, the others of `servers` are stopped."""
    for server in servers:
        server.signal(signal.SIGCONT if server in only else signal.SIGSTOP)


async def rounds(
    one: Deployment,
    others: Sequence[Deployment],
    length: int,
    num_rounds: int,
    num: int,
    pause: bool,
    sleep_s: float = SLEEP_S,
) -> dict[str, Row]:
    """Send `num_rounds` prompts to all of them, with `sleep_s` before each request. `pause`: only the servers that
    answer it run, from before `sleep_s`.
    """
    rng = random.Random(length)
    rows = {deployment.name: Row() for deployment in (one, *others)}
    servers = [server for deployment in (one, *others) for server in deployment.servers]
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        for index in range(WARM_UP + num_rounds):
            prompt = [rng.randrange(*VOCABULARY) for _ in range(length)]
            order = [one, *others]
            rng.shuffle(order)
            found: dict[str, list[int]] = {}
            for deployment in order:
                _resume(servers, deployment.servers if pause else servers)
                await asyncio.sleep(sleep_s)
                answer = await _ask(deployment, session, prompt, num)
                if answer is not None:
                    found[deployment.name] = answer.token_ids
                if index >= WARM_UP:
                    rows[deployment.name].add(answer)
            for name, tokens in found.items():
                rows[name].num_other += tokens != found.get(one.name)
    _resume(servers, servers)
    return rows


async def _ask(
    deployment: Deployment, session: aiohttp.ClientSession, prompt: Sequence[int], num: int
) -> Answer | None:
    try:
        return await deployment.legs.ask(session, prompt, num)
    except BatonError as error:
        print(f"{deployment.name}: {type(error).__name__}: {error}", flush=True)
        return None


async def processor(deployment: Deployment) -> tuple[float, float]:
    """Cores that its servers use together: idle, 2 s after the last request, and with one request parked."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        await asyncio.sleep(IDLE_AFTER_S)
        idle = await _cores(deployment)
        prompt = [random.Random(1).randrange(*VOCABULARY) for _ in range(512)]
        parked = asyncio.create_task(deployment.legs.park(session, prompt))
        # The first second is spent on the arrival of the request itself.
        await asyncio.sleep(IDLE_AFTER_S)
        waiting = await _cores(deployment)
        parked.cancel()
        await asyncio.gather(parked, return_exceptions=True)
        await asyncio.sleep(SLEEP_S)
    return idle, waiting


async def _cores(deployment: Deployment) -> float:
    started, before = time.monotonic(), sum(server.cpu_s() for server in deployment.servers)
    await asyncio.sleep(WINDOW_S)
    # The window is longer if all cores are busy.
    return (sum(server.cpu_s() for server in deployment.servers) - before) / (time.monotonic() - started)


def table(rows: dict[str, Row], one: str) -> list[str]:
    """Medians, and median ratios to `one` with their quartiles, as Markdown. "2nd gap": from the first to the second
    token, over the same answer's TPOT."""
    lines = ["| deployment | TTFT ms | over one | 2nd token ms | over one | 2nd gap | 10th ms | TPOT ms | over one | |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    base = rows[one]
    for name, row in rows.items():
        gaps = [second - first for first, second in zip(row.ttft, row.second, strict=True)]
        tenth = [first + sum(each[:9]) for first, each in zip(row.ttft, row.gaps, strict=True)]
        cells = [name, _median(row.ttft), _ratio(row.ttft, base.ttft), _median(row.second)]
        cells += [_ratio(row.second, base.second), _ratio(gaps, row.tpot), _median(tenth)]
        cells += [_median(row.tpot), _ratio(row.tpot, base.tpot)]
        notes = {"other answers": row.num_other, "failed": row.num_failed}
        cells.append(", ".join(f"{count} {note}" for note, count in notes.items() if count))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _median(values: list[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.2f}" if known else "-"


def _ratio(values: list[float], reference: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(values, reference, strict=True) if not math.isnan(a / b))
    if not ratios:
        return "-"
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})"


def vllm_command(
    vllm_python: Annotated[str, typer.Option(help="An interpreter that has vLLM.")] = sys.executable,
    model: Annotated[str, typer.Option(help="Checkpoint directory.")] = MODEL,
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,2000",
    num_rounds: Annotated[int, typer.Option(help="Rounds for each length; 0: none.")] = 12,
    num_rounds_shipped: Annotated[int, typer.Option(help="The same for vLLM's connectors as shipped; 0: none.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 640,
    max_tokens_shipped: Annotated[int, typer.Option(help="The same as shipped.")] = 16,
    peers: Annotated[str, typer.Option(help="vLLM's own connectors to measure too.")] = ",".join(PEERS),
    first_steps: Annotated[str, typer.Option(help="Values of first_step; verify needs speculation.")] = "recompute",
    flags: Annotated[str, typer.Option(help="Further arguments of every server.")] = "",
    log_dir: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write every time that was taken here.")] = None,
) -> None:
    """Time to first token, inter-token latency and CPU of vLLM servers, alone and with KV connectors."""
    sizes = [int(length) for length in lengths.split(",")]
    connectors, more = [name for name in peers.split(",") if name], flags.split()
    results: dict[str, Any] = {}

    def compare(others: Sequence[Deployment], rounds_each: int, tokens: int, pause: bool) -> None:
        for length in sizes:
            found = asyncio.run(rounds(one, others, length, rounds_each, tokens, pause))
            results[f"{length}, {rounds_each} rounds, {tokens} tokens"] = {n: asdict(row) for n, row in found.items()}
            print(f"\n{length} tokens, {rounds_each} rounds, {tokens} tokens each:")
            print("\n".join(table(found, one.name)), flush=True)
        for deployment in others:
            idle, parked = asyncio.run(processor(deployment))
            results[f"cores {deployment.name}"] = [idle, parked]
            print(f"cores, {deployment.name}: idle {idle:.3f}, one parked {parked:.2f}", flush=True)

    with contextlib.ExitStack() as stack:
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        (server,) = stack.enter_context(serve(vllm_python, model, folder, [ServerConfig("one", (*FLAGS, *more))]))
        one = Deployment("one vLLM", Single(server.url), (server,))
        if num_rounds:
            with contextlib.ExitStack() as pairs:
                others: list[Deployment] = []
                for first in get_args(FirstStep):
                    if first in first_steps.split(","):
                        pair = baton_servers(folder, more, first)
                        others += pairs.enter_context(serve_pair(vllm_python, model, folder, *pair))
                for connector in connectors:
                    pair = nixl_servers(connector, True, more)
                    others += pairs.enter_context(serve_pair(vllm_python, model, folder, *pair))
                compare(others, num_rounds, max_tokens, pause=False)
        for connector in connectors if num_rounds_shipped else ():
            with serve_pair(vllm_python, model, folder, *nixl_servers(connector, False, more)) as shipped:
                compare(shipped, num_rounds_shipped, max_tokens_shipped, pause=True)
    if json_output is not None:
        json_output.write_text(json.dumps(results))


if __name__ == "__main__":
    typer.run(vllm_command)
