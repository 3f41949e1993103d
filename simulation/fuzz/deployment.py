"""Fuzz the ports of whole processes without a key, while requests are handed off.

    python -m simulation.fuzz.deployment --frames 10000000 --keys

A prefill engine, a decode engine (`baton serve`) and a router (`baton router`) serve the demo model. Attackers send the
bytes of `simulation.fuzz.zmtp` to the engines' control sockets, and those of `simulation.fuzz.http_bytes` to all HTTP
ports. A client sends short requests to the router one after the other, each of which is handed off, and compares every
token. With `--keys` the engines have a key directory, and the attackers know the engines' public keys.

All processes must survive, every answer must be right, and memory, open files and threads must not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from zmq.utils import z85

from baton.bench.timed_stream import stream_completion
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import KeyRing, make_keys
from baton.openai.http.limits import HttpLimits
from simulation.fuzz.command import parse, print_faults, print_sent, print_times
from simulation.fuzz.messages import Usage, growth
from simulation.fuzz.strangers import Target, Wave, waves
from simulation.served import served

_MODEL = str(Path(__file__).parents[2] / "models" / "baton-demo-llama")
_NAMES = ("P", "D", "router")
_HAND_OFF_ALL = ("--max-local-prefill-length", "0")
_START_S = 600.0
_NUM_BEFORE = (200, 1000)  # answers before the attack: at least, and at most one per 10,000 frames
_NUM_PROMPTS = 16
_PAUSE_S = 0.01  # between two requests
# After the timeout for a connection's first bytes, no connection of an attacker is left.
_SETTLE_S = max(HttpLimits().head_s, 10.0) + 5.0


@dataclass(slots=True)
class Report:
    """`faults` is empty if all checks passed. `before` and `during` are seconds per answer."""

    sent: Wave = field(default_factory=Wave)
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
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        trust = ["--ticket-key-file", str(directory / "ticket.key")] if keys is None else ["--keys", str(keys)]
        load_or_create_key(directory / "ticket.key")
        common = [*trust, "--log-level", "error"]
        started: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        for engine, role in (("P", "prefill"), ("D", "decode")):
            flags = ["--kv-cache-memory", "100M", "--role", role, "--engine-id", engine]
            started[engine] = stack.enter_context(served(["serve", _MODEL, *flags, *common], directory / engine))
        urls = ["--prefill", started["P"][1], "--decode", started["D"][1]]
        started["router"] = stack.enter_context(
            served(["router", *urls, *common, *_HAND_OFF_ALL], directory / "router.log")
        )
        yield started


class Client:
    """Sends requests to the router from its own thread until `close`, and compares tokens."""

    def __init__(self, url: str, report: Report, num_before: int) -> None:
        self._url, self._report, self._num_before = url, report, num_before
        self._halted = threading.Event()
        self._under_attack = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)
        self._thread.start()

    def await_before(self) -> None:
        """Wait until the answers before the attack are complete. Raises `RuntimeError` if they do not come."""
        if not self._under_attack.wait(_START_S):
            raise RuntimeError(f"the deployment does not answer: {self._report.faults[:3]}")

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
                if asked == self._num_before:
                    self._under_attack.set()
                await asyncio.sleep(_PAUSE_S)


def run(
    frames: int,
    seed: int = 0,
    processes: int = 1,
    with_keys: bool = False,
    settle_s: float = _SETTLE_S,
    rate: float = math.inf,
) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as name, contextlib.ExitStack() as stack:
        keys = Path(name) / "keys" if with_keys else None
        if keys is not None:
            make_keys(keys, ["P", "D"])
        deployment = stack.enter_context(deployed(keys))
        at_least, at_most = _NUM_BEFORE
        client = Client(deployment["router"][1], report, min(max(frames // 10_000, at_least), at_most))
        stack.callback(client.close)
        client.await_before()
        targets = _targets(deployment, keys)
        began = time.monotonic()
        for wave in waves(targets, frames, processes, seed, rate):
            report.sent.add(wave)
            report.faults += wave.faults
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


def main() -> int:
    """Returns 0 if all checks passed."""
    options = parse("simulation.fuzz.deployment", __doc__, "--frames", 1, "engines have a key directory")
    report = run(options.frames, options.seed, options.processes, options.keys, rate=options.rate)
    print_sent(report.sent, report.seconds)
    print_times("answers", report.before, report.during)
    for usage in report.usage:
        print("usage      " + "; ".join(f"{name} {one}" for name, one in usage.items()))
    return print_faults(report.faults)


if __name__ == "__main__":
    sys.exit(main())
