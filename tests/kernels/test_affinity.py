"""Two threads on two shared cores get one each; with more cores, or one thread, the system places them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig
from baton.kernels.cpu.affinity import bind_team, end_team
from baton.kernels.cpu.omp import gomp_parallel
from testkit.engines import TARGET
from testkit.waiting import eventually

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two cores are needed")


def masks_in_team() -> list[set[int]]:
    """The cores of each of the two threads."""
    found: list[set[int]] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(os.sched_getaffinity(0)))
    gomp_parallel()(function, None, 2, 0)
    return found


def alone(cores: list[int], threads: int, call: Callable[[], list[set[int]]]) -> list[set[int]]:
    """Run `call` on its own thread, with `threads` torch threads and these cores."""

    def run() -> list[set[int]]:
        os.sched_setaffinity(0, cores)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return call()
        finally:
            torch.set_num_threads(before)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def bound() -> list[set[int]]:
    assert bind_team()
    return masks_in_team()


def left() -> list[set[int]]:
    assert not bind_team()
    return [os.sched_getaffinity(0)]


def test_each_thread_has_a_core() -> None:
    if gomp_parallel() is None:
        pytest.skip("another runtime than GNU's")
    assert sorted(map(sorted, alone(CORES[:2], 2, bound))) == [[core] for core in CORES[:2]]


@pytest.mark.parametrize(("cores", "threads"), [(CORES[:1], 2), (CORES[:2], 1), (CORES[:2], 3)])
def test_others_are_left_to_the_system(cores: list[int], threads: int) -> None:
    assert alone(cores, threads, left) == [set(cores)]


def test_a_choice_made_by_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert alone(CORES[:2], 2, left) == [set(CORES[:2])]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(model=TARGET))
    yield engine
    engine.close()


def test_an_engines_thread_binds_its_team(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    done = threading.Event()

    def note() -> bool:
        bound.append(threading.current_thread().name)
        done.set()
        return True

    monkeypatch.setattr("baton.engine.async_engine.bind_team", note)
    engine.start()
    assert done.wait(60)
    assert bound == ["baton-engine"]


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_a_team_ends_and_the_next_region_makes_another() -> None:
    if gomp_parallel() is None:
        pytest.skip("another runtime than GNU's")

    def new_team() -> set[str]:
        before = threads()
        assert len(masks_in_team()) == 2
        return threads() - before

    def teams() -> tuple[int, int]:
        first = new_team()
        assert end_team()
        # A thread that was joined, here or in an earlier test, is there for a moment.
        eventually(lambda: not first & threads())
        return len(first), len(new_team())

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(teams).result() == (1, 1)


def test_an_older_libgomp_cannot_end_teams() -> None:
    assert not end_team(object)


def test_an_engine_that_starts_leaves_no_team_of_the_thread_that_loaded_it(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note() -> bool:
        calls.append(threading.current_thread().name)
        return True

    monkeypatch.setattr("baton.engine.async_engine.end_team", note)
    engine.start()
    assert calls == [threading.current_thread().name]
