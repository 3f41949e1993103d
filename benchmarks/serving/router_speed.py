"""CPU time of routers per request and per token, and the time that they add to the first token.

    python -m benchmarks.serving.router_speed [--streams 1,16,64,256] [--vllm-router PATH] [--sglang-router PATH]

All routers stand in front of the same modelled prefill and decode server (`modelled_servers`, in another process) and
take turns. Each request's prompt is text. CPU time is that of all threads of a router and its children, by the
kernel. Streams of two lengths give the cost per token; what is left is that of a request. `Added`: the first token's
time, less the prefill's; `no router`: at the prefill server, whose timers are late as well. Streams begin evenly over a
second and run at once; more streams have longer steps, so that no router falls behind: tokens that wait are sent
together, which is cheap. `--handoff-ms`: how long after the prefill the decode server has the first token, several
values in turn; `benchmarks.sglang.first_tokens` measures it with SGLang's own servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.modelled_servers import MODEL
from benchmarks.vllm.servers import free_port
from testkit.servers.fake_serving import write_tokenizer

_SHORT = 2
_FIRST_S, _START_S, _RAMP_S = 0.02, 90.0, 1.0
_LEAST_STEP_S = 0.01
# Each figure comes from at least so many streams.
_LEAST_STREAMS = 16
_TRIES = 5
_TEXT = re.compile(rb'"text": ?"a"')
_BEFORE, _NO_ROUTER = " before", "no router"
_BUSY_S = 5.0
ROUTERS = ("baton-vllm", "baton", "vllm-router", "sglang-router")


class StreamFailed(Exception):
    """A router whose engines are slow to answer refuses requests: the wave is repeated."""


@dataclass(slots=True)
class RouterFigures:
    """One value per round. `request_ms`, `token_us`: of CPU time."""

    request_ms: list[float] = field(default_factory=list)
    token_us: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)

    def add(self, request_s: float, token_s: float, first: Sequence[float]) -> None:
        self.request_ms.append(1e3 * request_s)
        self.token_us.append(1e6 * token_s)
        self.added_ms.append(1e3 * (statistics.median(first) - _FIRST_S))

    def line(self, name: str, streams: int, handoff_ms: float) -> str:
        request, token, added = (statistics.median(each) for each in (self.request_ms, self.token_us, self.added_ms))
        low, high = min(self.token_us), max(self.token_us)
        cost = f"{request:.2f} | {token:.0f} ({low:.0f} to {high:.0f})"
        ttft = f"{added:.1f} ({min(self.added_ms):.1f} to {max(self.added_ms):.1f})"
        return f"| {streams} | {handoff_ms:g} | {name} | {cost} | {ttft} |"


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children."""
    found = 0.0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) / 1e9
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    found += cpu_s(int(child))
    return found


@contextlib.contextmanager
def _servers(directory: Path, step_s: float, handoff_ms: float) -> Iterator[list[str]]:
    """URLs of the prefill and the decode server."""
    command = [sys.executable, "-m", "benchmarks.serving.modelled_servers", str(directory)]
    command += ["--first-ms", str(1e3 * _FIRST_S), "--step-ms", str(1e3 * step_s)]
    command += ["--handoff-ms", str(handoff_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        finally:
            process.terminate()


@contextlib.contextmanager
def _running(command: Sequence[str], port: int, source: str | None = None) -> Iterator[int]:
    """A router that serves: its process id. `source`: Baton's, if it is another checkout's."""
    environment = os.environ if source is None else {**os.environ, "PYTHONPATH": source}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            until = time.monotonic() + _START_S
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not serve:\n{log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def _command(name: str, port: int, urls: Sequence[str], folder: Path, options: argparse.Namespace) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    metrics = ["--prometheus-port", str(free_port())]
    prefill, decode = urls
    both = ["--prefill", prefill, "--decode", decode]
    if name == "vllm-router":
        return [options.vllm_router, "--vllm-pd-disaggregation", "--policy", "round_robin", *both, *listen, *metrics]
    if name == "sglang-router":
        pd = ["--pd-disaggregation", "--policy", "round_robin", "--prefill", prefill, "8998", "--decode", decode]
        return [options.sglang_router, "-m", "sglang_router.launch_router", *pd, *listen, *metrics]
    ours = [sys.executable, "-m", "baton.cli", "router", "--max-local-prefill-length", "0", *both, *listen]
    ours += [] if name.endswith(_BEFORE) else options.flags.split()
    if name.startswith("baton-vllm"):
        return [*ours, "--engine", "vllm", "--kv-connector", "NixlConnector"]
    key = folder / "key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(32))
    return [*ours, "--ticket-key-file", str(key)]


async def _stream(port: int, num_tokens: int, delay_s: float) -> float:
    """The seconds to the first token of one stream."""
    await asyncio.sleep(delay_s)
    prompt = f"{secrets.token_hex(8)} " + "words " * 40
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps({**wanted, "temperature": 0.0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began, first, seen = time.perf_counter(), 0.0, bytearray()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while b"[DONE]" not in seen[-64:]:
            data = await reader.read(1 << 16)
            if not data:
                raise StreamFailed(f"a stream ended early: {bytes(seen[:2000])!r}")
            seen += data
            if not first and _TEXT.search(seen):
                first = time.perf_counter() - began
    finally:
        writer.close()
    if len(_TEXT.findall(seen)) != num_tokens:
        raise StreamFailed(f"{len(_TEXT.findall(seen))} tokens came, not {num_tokens}: {bytes(seen[:2000])!r}")
    return first


async def _wave(port: int, streams: int, num_tokens: int) -> list[float]:
    ramp = _RAMP_S / streams
    return list(await asyncio.gather(*(_stream(port, num_tokens, number * ramp) for number in range(streams))))


def _measured_wave(pid: int, port: int, streams: int, num_tokens: int) -> tuple[float, list[float]]:
    """CPU seconds of the router, and of each stream the seconds to its first token."""
    for _ in range(_TRIES):
        before = cpu_s(pid)
        with contextlib.suppress(StreamFailed):
            first = asyncio.run(_wave(port, streams, num_tokens))
            return cpu_s(pid) - before, first
    raise SystemExit(f"streams failed in {_TRIES} waves: is the machine busy?")


def _round(pid: int, port: int, streams: int, long: int, figures: RouterFigures) -> None:
    waves = max(1, _LEAST_STREAMS // streams)
    spent, first = [], list[float]()
    for num_tokens in (_SHORT, long):
        found = [_measured_wave(pid, port, streams, num_tokens) for _ in range(waves)]
        spent.append(sum(seconds for seconds, _ in found) / (waves * streams))
        first = [second for _, times in found for second in times]
    token_s = (spent[1] - spent[0]) / (long - _SHORT)
    figures.add(spent[0] - _SHORT * token_s, token_s, first)


async def _busy(port: int, clients: int, seconds: float) -> int:
    """The number of answers, if each client asks again at once."""
    until, num = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal num
        while time.perf_counter() < until:
            await _stream(port, _SHORT, 0.0)
            num += 1

    await asyncio.gather(*(ask() for _ in range(clients)))
    return num


def _measure_busy(running: dict[str, tuple[int, int]], clients: int, rounds: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, (pid, port) in running.items():
            before, began = cpu_s(pid), time.perf_counter()
            num = asyncio.run(_busy(port, clients, _BUSY_S))
            seconds, spent = time.perf_counter() - began, cpu_s(pid) - before
            found[name].append((num / seconds, spent / seconds, num / spent))
    for name, rows in found.items():
        rate, cores, of_core = (statistics.median(column) for column in zip(*rows, strict=True))
        low, high = min(row[2] for row in rows), max(row[2] for row in rows)
        print(f"| {name} | {rate:.0f} | {cores:.2f} | {of_core:.0f} ({low:.0f} to {high:.0f}) |", flush=True)


def measure(options: argparse.Namespace) -> None:
    names = [name for name in options.routers.split(",") if getattr(options, name.replace("-", "_"), True)]
    if options.before is not None:
        names += [name + _BEFORE for name in names if name.startswith("baton")]
    head = "| streams | handoff ms | router | CPU ms a request | CPU us a token (range) | added TTFT, ms (range) |"
    if options.clients:
        head = "| router | requests/s | cores | requests/s of a core (range) |"
    print(f"{head}\n{'|---' * (head.count('|') - 1)}|")
    all_streams = [options.clients] if options.clients else list(map(int, options.streams.split(",")))
    for streams, handoff_ms in itertools.product(all_streams, map(float, options.handoff_ms.split(","))):
        step_s = max(_LEAST_STEP_S, streams / options.tokens_per_s)
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
            urls = undo.enter_context(_servers(write_tokenizer(Path(folder) / "model"), step_s, handoff_ms))
            running = {}
            for name in names:
                port = free_port()
                command = _command(name, port, urls, Path(folder), options)
                source = f"{options.before}/src" if name.endswith(_BEFORE) else None
                running[name] = undo.enter_context(_running(command, port, source)), port
                _measured_wave(running[name][0], port, streams, _SHORT)  # not counted
            if options.clients:
                _measure_busy(running, options.clients, options.rounds)
                continue
            figures = {name: RouterFigures() for name in (*running, _NO_ROUTER)}
            for _ in range(options.rounds):
                _, first = _measured_wave(os.getpid(), int(urls[0].rpartition(":")[2]), max(streams, _LEAST_STREAMS), 1)
                figures[_NO_ROUTER].add(math.nan, math.nan, first)
                for name, (pid, port) in running.items():
                    _round(pid, port, streams, options.max_tokens, figures[name])
            for name in figures:
                print(figures[name].line(name, streams, handoff_ms), flush=True)
    length = _SHORT if options.clients else options.max_tokens
    print(
        f"answers of {length} tokens, {options.rounds} rounds; load of the machine at the end {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--clients",
        type=int,
        default=0,
        help="measure answers of two tokens instead, with so many clients that ask again at once",
    )
    parser.add_argument("--max-tokens", type=int, default=66, help="tokens of a long answer")
    parser.add_argument("--handoff-ms", default="0", help="from the end of a prefill to that of its handoff")
    parser.add_argument("--tokens-per-s", type=float, default=1250.0, help="of all streams, at most")
    parser.add_argument("--routers", default=",".join(ROUTERS), help="of " + ", ".join(ROUTERS))
    parser.add_argument("--before", metavar="DIRECTORY", help="also measure Baton of this checkout")
    parser.add_argument("--flags", default="", help="more flags of Baton's routers, but not of those of --before")
    parser.add_argument("--vllm-router", metavar="PATH", help="the command vllm-router")
    parser.add_argument("--sglang-router", metavar="PYTHON", help="of an environment with sglang-router")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
