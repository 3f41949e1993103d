"""Deployments whose processes are pinned to cores, and loads for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.load import Load, LoadRun, run_load
from baton.bench.load_figures import load_figures
from baton.bench.load_requests import LoadRequest, RandomPrompts, arrival_times
from baton.kv import page_pool
from baton.text import Tokenizer
from benchmarks.deployment import BreakableDeployment

METRICS = ("ttft", "tpot", "itl")
# Further request fields: generate all tokens, and the same ones each time.
EXTRA = {"ignore_eos": True, "temperature": 0.0}


def pin(pid: int, cores: Sequence[int]) -> None:
    """Pin a process to some cores, with its current threads and those that they will start."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


def pin_all(deployment: BreakableDeployment, cores: dict[str, Sequence[int]]) -> None:
    """Pin each child to the cores of its role: `prefill`, `decode`, `both`, `router`."""
    for name, pid in deployment.pids.items():
        pin(pid, cores[name.partition("-")[0]])


def hurry(pid: int) -> None:
    """Give a process and its threads real-time priority, so that the observer does not wait for what it observes. Exits
    if this user may not.
    """
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            sys.exit("real-time scheduling is not permitted here")


def parse_cores(text: str) -> list[int]:
    """Parse `0,1,4`. Exits if this process may not use one of the cores."""
    cores = [int(part) for part in text.split(",")]
    if not set(cores) <= os.sched_getaffinity(0):
        sys.exit(f"cores {text}: there are {sorted(os.sched_getaffinity(0))}")
    return cores


def make_requests(model: str, prompt: int, output: int, count: int, seed: int) -> list[LoadRequest]:
    tokenizer = Tokenizer.load(model)
    vocabulary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    return RandomPrompts(prompt, output).make(count, vocabulary, np.random.default_rng(seed))


def send(url: str, requests: Sequence[LoadRequest], rate: float, seed: int, many: int | None = None) -> LoadRun:
    """Send an open loop of Poisson arrivals; with an infinite rate, all at once with at most `many` in flight."""
    due = arrival_times(len(requests), rate, 1.0, np.random.default_rng(seed))
    return asyncio.run(run_load(url, Load(requests, due, many, EXTRA)))


def figures(run: LoadRun, goodput: dict[str, float] | None = None) -> dict[str, Any]:
    """Means, medians and the 99th percentile of one load, and the number of failed requests by kind of error."""
    found = load_figures(run.outcomes, run.duration_s, METRICS, (99.0,), goodput or {})
    errors: dict[str, int] = {}
    for outcome in run.outcomes:
        if outcome.error:
            kind = "429" if "429" in outcome.error else outcome.error
            errors[kind] = errors.get(kind, 0) + 1
    return {**found, "errors_by_kind": errors}


class Scattered:
    """Replaces `baton.kv.extents.Extents`: pages come in random order, hardly ever two neighbours."""

    def __init__(self, start: int, stop: int) -> None:
        self._pages = list(range(start, stop))
        self._random = random.Random(0)
        self._random.shuffle(self._pages)

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def add(self, pages: Iterable[int]) -> None:
        """Free pages, each at a random position."""
        for page in pages:
            self._pages.append(page)
            place = self._random.randrange(len(self._pages))
            self._pages[place], self._pages[-1] = self._pages[-1], self._pages[place]

    def take(self, count: int, after: int | None = None) -> list[int]:
        return [self._pages.pop() for _ in range(count)]


if __name__ == "__main__":
    # `baton` with page pools that scatter.
    setattr(page_pool, "Extents", Scattered)  # noqa: B010
    from baton.cli import main

    main()
