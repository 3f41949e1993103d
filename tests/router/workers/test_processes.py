"""Forked processes: all serve, are ended together, and are replaced if they end by themselves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.router.workers.worker_processes import WorkerProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts on SIGTERM of a forked process")


def serve_until_sigterm(number: int, ready: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ready()
    signal.sigwait({signal.SIGTERM})


def test_all_serve_and_end_with_sigterm() -> None:
    ended: list[int] = []
    workers = WorkerProcesses(3, serve_until_sigterm, ended.append)
    workers.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sorted(ended) == [0, 1, 2]


def test_one_that_ends_is_replaced(tmp_path: Path) -> None:
    def serve(number: int, ready: Callable[[], None]) -> None:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) == 1:
            return  # the first of all
        serve_until_sigterm(number, ready)

    ended: list[int] = []
    workers = WorkerProcesses(1, serve, ended.append, young_s=0.0)
    workers.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert ended == [0, 0]


def test_one_that_ends_at_once_ends_all() -> None:
    def serve(number: int, ready: Callable[[], None]) -> None:
        if number:
            raise BatonError("it cannot serve")
        serve_until_sigterm(number, ready)

    with pytest.raises(BatonError, match="router process 1 ended with 1 soon after its start"):
        WorkerProcesses(2, serve).run(lambda: None)
