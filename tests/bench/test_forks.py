"""Servers as forks of one process; without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.processes.launcher import Launcher, Order

COMMAND = """
import os, time
from testkit.processes.forks import fork_on_order

shared = []

def serve(arguments):
    print(*arguments, *shared, os.environ["OWN"], "PATH" in os.environ, flush=True)
    if "ends" in arguments:
        os.write(int(arguments[1]), b"heard " + os.read(int(arguments[2]), 100))
        raise SystemExit(7)
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
    assert (tmp_path / "ended").read_text() == "imported once own True\n"
    assert runs.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        runs.wait(0.0)
    runs.terminate()
    assert runs.wait(60.0) == runs.wait(60.0) == -signal.SIGTERM
    runs.terminate()


def test_a_fork_has_descriptors_under_their_numbers_and_a_status(launcher: Launcher, tmp_path: Path) -> None:
    """Here each has the number of another."""
    (heard, answer), (question, asks) = os.pipe(), os.pipe()
    told = Order(
        arguments=["ends", str(question), str(answer)],
        environment={"OWN": "own"},
        alone=True,
        log=str(tmp_path / "log"),
        numbers=[question, answer],
    )
    ends = launcher.start(told, [answer, question])
    os.close(answer)
    os.write(asks, b"it")
    assert os.read(heard, 100) == b"heard it"
    assert os.read(heard, 100) == b"", "no other process has it open"
    assert ends.wait(60.0) == ends.poll() == 7
    assert (tmp_path / "log").read_text() == f"ends {question} {answer} imported once own False\n"
    for file in (heard, question, asks):
        os.close(file)


def test_servers_end_with_the_process_that_forks(launcher: Launcher, tmp_path: Path) -> None:
    runs = launcher.start(order(tmp_path / "runs", "serves"))
    launcher.close()
    runs.wait(60.0)
