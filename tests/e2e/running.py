"""A `baton up` that runs while a test does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 120.0
END_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Up:
    """A running `baton up`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running_up(model: str, log: Path, *flags: str) -> Iterator[Up]:
    """One prefill and one decode engine, ready. Whatever happens, no process is left."""
    port = free_port()
    command = [sys.executable, "-m", "baton.cli", "up", model, "--prefill", "1", "--decode", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    up = Up(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while f"ready: {up.url}/v1" not in log.read_text():
            started = process.poll() is None and time.monotonic() < deadline
            assert started, f"baton up did not start: {log.read_text()}"
            time.sleep(0.05)
        yield up
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
