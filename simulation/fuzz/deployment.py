"""Fuzz the ports of whole processes without a key, while requests are handed off.

    python -m simulation.fuzz.deployment --frames 10000000 --keys

A prefill engine, a decode engine (`baton serve`) and a router (`baton router`) serve the demo model. Attackers send the
bytes of `simulation.fuzz.zmtp` to the engines' control sockets, and those of `simulation.fuzz.http_bytes` to all HTTP
ports. A client sends short requests to the router one after the other, each of which is handed off, and compares every
token. With `--keys` the engines have a key directory, and the attackers know the engines' public keys.

All processes must survive, every answer must be right, and memory, open files and threads must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from zmq.utils import z85

from baton.bench.client import stream_completion
from baton.deployment import BATON
from baton.handoff.session.keys import KeyRing, make_keys
from baton.openai.http.limits import HttpLimits
from simulation.fuzz.messages import Usage, growth
from simulation.fuzz.strangers import Target, attack

_MODEL = str(Path(__file__).parents[2] / "models" / "baton-demo-llama")
_NAMES = ("P", "D", "router")
_HAND_OFF_ALL = ("--max-local-prefill-length", "0")
_START_S = 120.0
_NUM_BEFORE = 200  # answers before the attack
_NUM_PROMPTS = 16
# After the timeout for a connection's first bytes, no connection of an attacker is left.
_SETTLE_S = max(HttpLimits().head_s, 10.0) + 5.0


@dataclass(slots=True)
class Report:
    """`faults` is empty if all checks passed. `before` and `during` are seconds per answer."""

    frames: int = 0
    connections: int = 0
    seconds: float = 0.0
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    usage: list[dict[str, Usage]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def deployed(keys: Path | None) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], str]]]:
    """Start P, D and a router as processes. Yields each one's process and URL by name. Raises `RuntimeError` if one
    does not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as name:
        directory = Path(name)
        ticket_key = directory / "ticket.key"
        ticket_key.write_bytes(os.urandom(32))
        ticket_key.chmod(0o600)
        trust = ["--keys", str(keys)] if keys is not None else ["--ticket-key-file", str(ticket_key)]
        common = [*trust, "--log-level", "error"]
        urls = {name: f"http://127.0.0.1:{_free_port()}" for name in _NAMES}
        engine = ["serve", _MODEL, "--kv-cache-memory", "100M", *common]
        arguments = {
            "P": [*engine, "--role", "prefill", "--engine-id", "P"],
            "D": [*engine, "--role", "decode", "--engine-id", "D"],
            "router": ["router", "--prefill", urls["P"], "--decode", urls["D"], *common, *_HAND_OFF_ALL],
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = {}
        try:
            for name in _NAMES:
                log = (directory / name).open("wb")
                command = [*BATON, *arguments[name], "--port", urls[name].rpartition(":")[2]]
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                _await_health(processes[name], urls[name], directory / name)
            yield {name: (processes[name], urls[name]) for name in _NAMES}
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not answer:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


class Client:
    """Sends requests to the router from its own thread until `close`, and compares tokens."""

    def __init__(self, url: str, report: Report) -> None:
        self._url, self._report = url, report
        self._halted = threading.Event()
        self._under_attack = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)
        self._thread.start()

    def await_before(self) -> None:
        """Wait until the answers before the attack are complete. Raises `RuntimeError` if they do not come."""
        if not self._under_attack.wait(_START_S):
            raise RuntimeError("the deployment does not answer")

    def close(self) -> None:
        """Stop after the current request."""
        self._halted.set()
        self._thread.join(60)

    async def _ask(self) -> None:
        rng = random.Random(0)
        prompts = [[rng.randrange(10, 250) for _ in range(24)] for _ in range(_NUM_PROMPTS)]
        right: dict[int, list[int]] = {}
        asked = 0
        async with aiohttp.ClientSession() as session:
            while not self._halted.is_set():
                number = asked % _NUM_PROMPTS
                body: dict[str, Any] = {"model": Path(_MODEL).name, "prompt": prompts[number], "max_tokens": 8}
                body.update(temperature=0.0, ignore_eos=True)
                began = time.monotonic()
                try:
                    answer = await stream_completion(session, self._url, body)
                except Exception as error:  # any exception means that the client has no answer
                    self._report.faults.append(f"request {asked}: {type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)
                else:
                    took = time.monotonic() - began
                    if answer.token_ids != right.setdefault(number, answer.token_ids) or len(answer.token_ids) != 8:
                        self._report.faults.append(f"request {asked}: other tokens")
                    (self._report.during if self._under_attack.is_set() else self._report.before).append(took)
                asked += 1
                if asked == _NUM_BEFORE:
                    self._under_attack.set()
                await asyncio.sleep(0.002)


def run(frames: int, seed: int = 0, processes: int = 1, with_keys: bool = False, settle_s: float = _SETTLE_S) -> Report:
    report = Report()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as name, contextlib.ExitStack() as stack:
        keys = Path(name) / "keys" if with_keys else None
        if keys is not None:
            make_keys(keys, ["P", "D"])
        deployment = stack.enter_context(deployed(keys))
        client = Client(deployment["router"][1], report)
        stack.callback(client.close)
        client.await_before()
        targets = _targets(deployment, keys)
        began = time.monotonic()
        # A first attack warms up; growth is measured over the second.
        for wave, share in enumerate((frames // 5, frames - frames // 5)):
            sent: Any = spawn.Queue()
            args = [(seed * 1000 + wave * 100 + i, share // processes, targets, sent) for i in range(processes)]
            attackers = [spawn.Process(target=attack, args=one, daemon=True) for one in args]
            for attacker in attackers:
                attacker.start()
            for attacker in attackers:
                attacker.join()
                if attacker.exitcode:
                    report.faults.append(f"an attacker ended with {attacker.exitcode}")
                    continue
                with contextlib.suppress(queue.Empty):
                    num_frames, num_connections = sent.get(timeout=5.0)
                    report.frames, report.connections = report.frames + num_frames, report.connections + num_connections
            time.sleep(settle_s)
            ended = {name: process.poll() for name, (process, _) in deployment.items()}
            report.faults += [f"{name} ended with {code}" for name, code in ended.items() if code is not None]
            if report.faults:
                break
            report.usage.append({name: Usage.of(process.pid) for name, (process, _) in deployment.items()})
        report.seconds = time.monotonic() - began
    if len(report.usage) == 2 and settle_s:
        first, second = report.usage
        report.faults += [f"{name}: {fault}" for name in _NAMES for fault in growth(first[name], second[name])]
    return report


def _targets(deployment: dict[str, tuple[Any, str]], keys: Path | None) -> list[Target]:
    """All ports of the deployment. Control sockets are listed several times, since they get small frames."""
    found = []
    for name, (_, url) in deployment.items():
        found.append(Target("127.0.0.1", int(url.rpartition(":")[2]), http=True))
        if name == "router":
            continue
        with urllib.request.urlopen(f"{url}/inference/v1/info") as reply:
            addresses = json.load(reply)["control_addresses"]
        public = None if keys is None else z85.decode(KeyRing(str(keys), name).public)
        found += [Target("127.0.0.1", int(one.rpartition(":")[2]), public) for one in addresses] * 2
    return found


def tell(report: Report) -> None:
    print(f"sent       {report.frames} frames in {report.connections} connections, {report.seconds:.0f} s")
    for name, times in (("before", report.before), ("during", report.during)):
        if times:
            cuts = statistics.quantiles(times, n=100)
            figures = (
                f"median {cuts[49] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms, slowest {max(times) * 1000:.0f} ms"
            )
            print(f"{name:<10} {len(times)} answers, {figures}")
    for usage in report.usage:
        print("usage      " + "; ".join(f"{name} {one}" for name, one in usage.items()))
    for fault in report.faults[:20]:
        print(f"FAULT      {fault}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all checks passed."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation.fuzz.deployment", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="attacking processes")
    parser.add_argument("--keys", action="store_true", help="engines have a key directory")
    options = parser.parse_args(arguments)
    report = run(options.frames, options.seed, options.processes, options.keys)
    tell(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
