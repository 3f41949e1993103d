"""A `baton up` that runs while a test does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 120.0
END_LIMIT_S = 30.0
READY = re.compile(r"ready: (http://\S+)/v1 ")


@dataclass(frozen=True, slots=True)
class Up:
    """A running `baton up`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextmanager
def running_up(model: str, log: Path, *flags: str) -> Iterator[Up]:
    """One prefill and one decode engine, ready. Whatever happens, no process is left."""
    command = [sys.executable, "-m", "baton.cli", "up", model, "--prefill", "1", "--decode", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while (ready := READY.search(log.read_text())) is None:
            started = process.poll() is None and time.monotonic() < deadline
            assert started, f"baton up did not start: {log.read_text()}"
            time.sleep(0.05)
        yield Up(process, ready[1], log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
