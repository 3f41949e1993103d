"""Where the first tokens' time goes in vLLM on CPUs, part by part: one server, and P/D by push and by pull.

    python -m benchmarks.vllm.hops --vllm-python $(python3 tools/install_vllm.py)/bin/python

Sends the same new prompt to each deployment in turn, without a router, and prints for each the median milliseconds from
the request to each mark of `benchmarks.vllm.marks`, by server; then the CPU time that each of its threads used for a
request, and waited for a core. On a busy machine only CPU times are worth something.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import aiohttp
import typer

from benchmarks.vllm.first_tokens import SLEEP_S, deployments
from benchmarks.vllm.handoffs import MODEL, TIMEOUT, VOCABULARY, WARM_UP, Deployment
from benchmarks.vllm.marks import announce, read_marks
from benchmarks.vllm.servers import ENVIRONMENT, VllmServer

# Name, milliseconds of CPU and of waits for cores.
Threads = dict[tuple[int, int], tuple[str, float, float]]
LEAST_CPU_MS = 0.05


@dataclass(slots=True)
class Hops:
    """Of one deployment. `times`: milliseconds since the request, by server and mark (with its number, from the second
    of a kind on); `cpu`: of CPU, and of waits for a core, by server and thread. One value a round."""

    times: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def add_times(self, server: str, labels: Sequence[tuple[float, str]]) -> None:
        seen: Counter[str] = Counter()
        for at, label in labels:
            seen[label] += 1
            self.times[server, label if seen[label] == 1 else f"{label} {seen[label]}"].append(at)

    def lines(self, num_rounds: int) -> list[str]:
        """Marks that half of the rounds have, in order of time."""
        rows = [
            (statistics.median(values), server, label)
            for (server, label), values in self.times.items()
            if len(values) * 2 >= num_rounds
        ]
        found = ["| ms | server | mark |", "|---|---|---|"]
        found += [f"| {at:.2f} | {server} | {label} |" for at, server, label in sorted(rows)]
        totals = [
            (*(statistics.median(each) for each in zip(*values, strict=True)), server, name)
            for (server, name), values in self.cpu.items()
        ]
        found += ["", "| CPU ms | waits ms | server | thread |", "|---|---|---|---|"]
        for used, waited, server, name in sorted(totals, reverse=True):
            if used >= LEAST_CPU_MS:
                found.append(f"| {used:.2f} | {waited:.2f} | {server} | {name} |")
        return found


def threads_of(server: VllmServer) -> Threads:
    """All of a server's."""
    found: Threads = {}
    for pid in server.process_ids():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                used, waited, _ = (int(each) / 1e6 for each in (task / "schedstat").read_text().split())
                found[pid, int(task.name)] = (task / "comm").read_text().strip(), used, waited
    return found


def _used(before: Threads, after: Threads) -> Mapping[str, tuple[float, float]]:
    """A process's first thread is called by its process."""
    found: dict[str, tuple[float, float]] = {}
    for (pid, thread), (name, used, waited) in after.items():
        _, used_before, waited_before = before.get((pid, thread), (name, 0.0, 0.0))
        process = after[pid, pid][0] if (pid, pid) in after else str(pid)
        label = process if pid == thread else f"{process}: {name}"
        so_far = found.get(label, (0.0, 0.0))
        found[label] = so_far[0] + used - used_before, so_far[1] + waited - waited_before
    return found


async def measure(
    found: Sequence[Deployment], marks: Path, length: int, num_rounds: int, max_tokens: int
) -> dict[str, Hops]:
    """Of `num_rounds` prompts, each sent to all deployments in changing order."""
    rng, hops = random.Random(length), {deployment.name: Hops() for deployment in found}
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        for index in range(WARM_UP + num_rounds):
            prompt = [rng.randrange(*VOCABULARY) for _ in range(length)]
            order = [*found]
            rng.shuffle(order)
            for deployment in order:
                before = [threads_of(server) for server in deployment.servers]
                start = time.monotonic()
                answer = await deployment.legs.ask(session, prompt, max_tokens)
                end = time.monotonic()
                after = [threads_of(server) for server in deployment.servers]
                await asyncio.sleep(SLEEP_S)
                if index < WARM_UP:
                    continue
                row = hops[deployment.name]
                row.add_times("client", [(1e3 * at, f"token {n + 1}") for n, at in enumerate(answer.times_s[:3])])
                for server, then, now in zip(deployment.servers, before, after, strict=True):
                    side = server.name.rsplit("-", 1)[-1]
                    for pid in server.process_ids():
                        passed = read_marks(marks, pid, start, end)
                        row.add_times(side, [(1e3 * (mark.at - start), mark.label) for mark in passed])
                    for thread, used in _used(then, now).items():
                        row.cpu[side, thread].append(used)
    return hops


def hops_command(
    vllm_python: Annotated[str, typer.Option(help="An interpreter that has vLLM.")] = sys.executable,
    model: Annotated[str, typer.Option(help="Checkpoint directory.")] = MODEL,
    drafter: Annotated[str, typer.Option(help="Its EAGLE-3 drafter; empty: without speculation.")] = "",
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,2000",
    num_rounds: Annotated[int, typer.Option(help="Rounds for each length.")] = 14,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 4,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the servers' logs and all marks here.")] = None,
) -> None:
    """Marks of requests on their way, and CPU time by thread."""
    with tempfile.TemporaryDirectory(prefix="baton-hops-") as scratch:
        folder = log_dir or Path(scratch)
        with patch.dict(ENVIRONMENT, announce(folder / "plugin")):
            started = deployments(vllm_python, model, folder, drafter or None, ["verify"], [])
            with started as (one, pairs):
                for length in (int(each) for each in lengths.split(",")):
                    marks = folder / "plugin" / "marks"
                    hops = asyncio.run(measure([one, *pairs], marks, length, num_rounds, max_tokens))
                    for name, row in hops.items():
                        print(f"\n{name}, {length} tokens, {num_rounds} rounds:")
                        print("\n".join(row.lines(num_rounds)), flush=True)


if __name__ == "__main__":
    typer.run(hops_command)
