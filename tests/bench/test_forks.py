"""Servers as forks of one process; without an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.processes.forks import Launcher, Order

COMMAND = """
import os, time
from testkit.processes.forks import fork_on_order

shared = []

def serve(arguments):
    print(*arguments, *shared, os.environ["OWN"], flush=True)
    time.sleep(600 if arguments else 0)

fork_on_order(lambda: shared.append("imported once"), serve)
"""


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    found = Launcher([sys.executable, "-c", COMMAND], os.environ)
    yield found
    found.close()


def order(log: Path, *arguments: str) -> Order:
    return Order(arguments=[*arguments], environment={"OWN": "own"}, log=str(log))


def test_a_fork_is_a_process_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    runs = launcher.start(order(tmp_path / "runs", "serves"))
    ended = launcher.start(order(tmp_path / "ended"))
    assert os.getsid(runs.pid) == runs.pid != ended.pid
    assert ended.wait(60.0) == ended.poll()
    assert (tmp_path / "ended").read_text() == "imported once own\n"
    assert runs.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        runs.wait(0.0)
    runs.terminate()
    runs.wait(60.0)
    runs.wait(60.0)
    runs.terminate()


def test_servers_end_with_the_process_that_forks(launcher: Launcher, tmp_path: Path) -> None:
    runs = launcher.start(order(tmp_path / "runs", "serves"))
    launcher.close()
    runs.wait(60.0)
