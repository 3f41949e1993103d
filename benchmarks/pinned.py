"""Deployments whose processes keep to cores of their own, and loads on them whose rounds alternate."""

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
from baton.bench.prompts import LoadRequest, RandomPrompts, arrivals
from baton.kv import pool
from baton.text import Tokenizer
from benchmarks.deployment import BreakableDeployment

METRICS = ("ttft", "tpot", "itl")
# What a client asks besides: all of an answer's tokens, and the same ones each time.
EXTRA = {"ignore_eos": True, "temperature": 0.0}


def pin(pid: int, cores: Sequence[int]) -> None:
    """Keep a process, with the threads that it has and those that they will start, to some cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


def pin_all(deployment: BreakableDeployment, cores: dict[str, Sequence[int]]) -> None:
    """Keep each child to the cores of its role: `prefill`, `decode`, `both`, `router`."""
    for name, pid in deployment.pids.items():
        pin(pid, cores[name.partition("-")[0]])


def hurry(pid: int) -> None:
    """Let a process, with its threads, run before all others as soon as it can: what observes is not to wait for what
    is observed. Exits where this user may not."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            sys.exit("real-time scheduling is not permitted here")


def parse_cores(text: str) -> list[int]:
    """`0,1,4`. Exits where this process may not use one of them."""
    cores = [int(part) for part in text.split(",")]
    if not set(cores) <= os.sched_getaffinity(0):
        sys.exit(f"cores {text}: there are {sorted(os.sched_getaffinity(0))}")
    return cores


def make_requests(model: str, prompt: int, output: int, count: int, seed: int) -> list[LoadRequest]:
    """Random prompts of equal length."""
    tokenizer = Tokenizer.load(model)
    vocabulary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    return RandomPrompts(prompt, output).make(count, vocabulary, np.random.default_rng(seed))


def send(url: str, requests: Sequence[LoadRequest], rate: float, seed: int, many: int | None = None) -> LoadRun:
    """An open loop of Poisson arrivals; with an infinite rate all at once, but for `many` in flight."""
    due = arrivals(len(requests), rate, 1.0, np.random.default_rng(seed))
    return asyncio.run(run_load(url, Load(requests, due, many, EXTRA)))


def figures(run: LoadRun, goodput: dict[str, float] | None = None) -> dict[str, Any]:
    """Of one load: means, medians and the 99th percentile, and how many requests failed by what."""
    found = load_figures(run.outcomes, run.duration_s, METRICS, (99.0,), goodput or {})
    errors: dict[str, int] = {}
    for outcome in run.outcomes:
        if outcome.error:
            kind = "429" if "429" in outcome.error else outcome.error
            errors[kind] = errors.get(kind, 0) + 1
    return {**found, "errors_by_kind": errors}


class Scattered:
    """In place of `baton.kv.extents.Extents`: pages in no order, hardly ever two neighbours."""

    def __init__(self, start: int, stop: int) -> None:
        self._pages = list(range(start, stop))
        self._random = random.Random(0)
        self._random.shuffle(self._pages)

    @property
    def num_pages(self) -> int:
        """Pages that are free."""
        return len(self._pages)

    def add(self, pages: Iterable[int]) -> None:
        """Pages that are free from now on, each in a random place."""
        for page in pages:
            self._pages.append(page)
            place = self._random.randrange(len(self._pages))
            self._pages[place], self._pages[-1] = self._pages[-1], self._pages[place]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Any pages."""
        return [self._pages.pop() for _ in range(count)]


if __name__ == "__main__":
    # `baton` with pools that scatter.
    setattr(pool, "Extents", Scattered)  # noqa: B010
    from baton.cli import main

    main()
