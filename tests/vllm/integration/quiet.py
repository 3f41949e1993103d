"""Waits that leave the cores to others: a plug-in of vLLM's, which loads it in each of its processes.

On CPUs vLLM's processes wait for each other awake. Tensor ranks and stages spin in a collective until the other comes
to it too, an engine until its workers answer a step, a worker for a second after each one. Two servers of two ranks are
six such processes, and where there are two cores the one that all wait for is mostly not among those that run.
"""

from __future__ import annotations

from pathlib import Path

NAME = "baton_tests_quiet"
AWAKE_S = 0.002


def sleep_when_waiting() -> None:
    """Collectives by torch's gloo, which vLLM takes where ranks share no memory; queues that are waited for asleep."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    assert SpinCondition.__init__.__defaults__ is not None, "its `busy_loop_s`"
    SpinCondition.__init__.__defaults__ = (AWAKE_S,)


def announce(folder: Path) -> str:
    """The folder of a package that vLLM finds the plug-in by, for PYTHONPATH."""
    found = folder / f"{NAME}-1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (found / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:sleep_when_waiting\n")
    return str(folder)
