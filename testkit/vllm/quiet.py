"""vLLM servers for tests: small ones that start soon (`testkit.vllm.forks`), with waits that do not spin, by a vLLM
plug-in, which vLLM loads in each of its processes.

vLLM's processes spin while they wait for each other: ranks and stages in a collective, an engine for its workers, a
worker for a second after each step. Two servers of two ranks are six such processes: the one that all wait for rarely
has a core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from benchmarks.vllm import servers
from testkit.vllm.forks import Forks

NAME = "baton_tests_quiet"
AWAKE_S = 0.002
# By default vLLM takes eight times as much, and writes zeros into all of it. A fleet has up to eight workers.
KV_CACHE = ["--kv-cache-memory-bytes", str(128 << 20)]
# Even with `--enforce-eager` vLLM compiles small functions in each worker at first use: seconds of CPU and a C++
# compiler, while requests wait.
AS_WRITTEN = {"TORCHDYNAMO_DISABLE": "1"}
# Numba's idle threads spin too (n-gram drafts).
ONE_THREAD = {"NUMBA_NUM_THREADS": "1"}


@contextlib.contextmanager
def small_servers(folder: Path) -> Iterator[Forks]:
    """Limit the memory and CPU of servers that are started meanwhile (vLLM 0.32), and end them. `folder` is for the
    plug-in.
    """
    environment = servers.ENVIRONMENT | AS_WRITTEN | ONE_THREAD | {"PYTHONPATH": announce(folder)}
    del environment["VLLM_CPU_KVCACHE_SPACE"]  # it would take precedence
    with (
        patch.multiple(servers, FLAGS=[*servers.FLAGS, *KV_CACHE], ENVIRONMENT=environment),
        contextlib.closing(Forks()) as forks,
        patch.object(servers, "launch", forks.launch),
    ):
        yield forks


def sleep_when_waiting() -> None:
    """Collectives use torch's gloo, which vLLM takes if ranks share no memory; queues are waited for without
    spinning.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    assert SpinCondition.__init__.__defaults__ is not None, "its `busy_loop_s`"
    SpinCondition.__init__.__defaults__ = (AWAKE_S,)


def announce(folder: Path) -> str:
    """Make a package by whose entry point vLLM finds the plug-in. Returns its folder, for PYTHONPATH."""
    found = folder / f"{NAME}-1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (found / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:sleep_when_waiting\n")
    return str(folder)
