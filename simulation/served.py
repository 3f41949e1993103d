"""Runs commands of `baton` that serve HTTP, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from baton.cli.data_ranks import free_ports
from baton.deployment import BATON, end_processes

_START_S = 300.0


@contextlib.contextmanager
def served(
    arguments: Sequence[str], log: Path, cwd: Path | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `baton ARGUMENTS` on a free port of loopback and one thread. Yields the process and its URL once it is
    healthy, and ends it. `environment` adds to this process's own.

    Raises `RuntimeError`, with the end of the log, if it does not start.
    """
    with contextlib.ExitStack() as stack:
        (port,) = stack.enter_context(free_ports("127.0.0.1", 0, 1))
        out = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [*BATON, *arguments, "--port", str(port)],
            stdout=out,
            stderr=out,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        stack.callback(end_processes, [process])
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"baton {arguments[0]} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield process, url


def _is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
    except OSError:
        return False
    return True
