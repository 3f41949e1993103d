"""Plays many seeds over a few processes."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Collection, Iterator
from functools import partial

from simulation.mutations import applied
from simulation.report import Summary
from simulation.scenario import run_seed
from simulation.settings import FAULTS

_CHUNK = 50


def quiet_logs() -> None:
    """Silence the protocol's warnings: a simulation causes them all the time."""
    logging.getLogger("baton").setLevel(logging.CRITICAL)


def run_seeds(
    seeds: range,
    faults: Collection[str] = FAULTS,
    workers: int = 1,
    mutation: str | None = None,
    stop_early: bool = False,
    progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Play `seeds`, with `mutation` if one is named. `stop_early`: stop at the first failure. Raises `ConfigError` for
    an unknown mutation.
    """
    total = Summary()
    for part in _parts(seeds, faults, workers, mutation, stop_early):
        total.merge(part)
        if progress is not None:
            progress(total)
        if stop_early and total.failures:
            break
    return total


def _parts(
    seeds: range, faults: Collection[str], workers: int, mutation: str | None, stop_early: bool
) -> Iterator[Summary]:
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    run = partial(_chunk, faults=sorted(faults), mutation=mutation, stop_early=stop_early)
    if workers == 1:
        yield from map(run, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(workers, quiet_logs) as pool:
        yield from pool.imap(run, chunks)


def _chunk(seeds: range, faults: Collection[str], mutation: str | None, stop_early: bool) -> Summary:
    summary = Summary()
    with applied(mutation):
        for seed in seeds:
            summary.add(run_seed(seed, faults))
            if stop_early and summary.failures:
                break
    return summary
