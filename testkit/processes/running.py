"""A `baton` command that serves while a test runs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.deployment import BATON, end_processes

START_LIMIT_S = 300.0
END_LIMIT_S = 60.0
READY = re.compile(r"(?:ready:|is served at) (http://\S+)/v1\s")


def environment() -> dict[str, str]:
    """This process's environment, for one compute thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Running:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


def run(
    *arguments: str, limit_s: float = START_LIMIT_S, command: Sequence[str] = BATON
) -> subprocess.CompletedProcess[str]:
    """Run `baton ARGUMENTS` to its end. Its output goes to files, because forks of the fixture `forks` have no
    `communicate`. Raises `subprocess.TimeoutExpired`.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment()
        )
        try:
            status = process.wait(limit_s)
        finally:
            end_processes([process], END_LIMIT_S)
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, stdout.read(), stderr.read())


@contextmanager
def running(log: Path, *arguments: str, command: Sequence[str] = BATON) -> Iterator[Running]:
    """Run `baton ARGUMENTS`, ready, at a free port. The process always ends with the context."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while (ready := READY.search(log.read_text())) is None:
            started = process.poll() is None and time.monotonic() < deadline
            assert started, f"baton did not start: {log.read_text()}"
            time.sleep(0.05)
        yield Running(process, ready[1], log)
    finally:
        end_processes([process], END_LIMIT_S)


def running_up(model: str, log: Path, *flags: str) -> AbstractContextManager[Running]:
    return running(log, "up", model, "--prefill", "1", "--decode", "1", "--kv-cache-memory", "64M", *flags)
