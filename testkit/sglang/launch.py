"""Processes of SGLang servers on this machine's CPU."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.children import die_with_parent
from testkit.processes.launcher import Launcher, Order, Process

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "sglang" / "support"
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "8192"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
]
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # Without it SGLang needs a route to the internet.
    "SGLANG_HOST_IP": "127.0.0.1",
    # Pages that are missing when it is idle end it.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    # It would compile small functions of the sampler and the drafter at the first request, for a minute.
    "TORCHDYNAMO_DISABLE": "1",
    # Of each tensor rank; the default is a NUMA node, of which there may be one.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    # SGLang would use NCCL, which comes with PyTorch, between ranks on a CPU too.
    "SGLANG_NCCL_SO_PATH": "none",
}
# SGLang's attention in PyTorch has no path for drafts; the stand-in's has.
KERNELS = "baton_test_kernels = sgl_kernel.plugin:register\n"


@functools.cache
def launcher() -> Launcher:
    """Of all servers of this process."""
    return Launcher([sys.executable, "-m", "testkit.sglang.forks"], _environment())


def start(
    model: Path, flags: Sequence[str], environment: dict[str, str], log: Path, port: int, forked: bool = True
) -> Process:
    """`forked`: by `forks`, else by SGLang's own command."""
    arguments = ["--model-path", str(model), *FLAGS, "--port", str(port), *flags]
    folder = _announce(log.parent)
    if forked:
        return launcher().start(
            Order(arguments=arguments, environment=environment, log=str(log), folder=str(folder)),
        )
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            env=_environment(folder) | environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _environment(*folders: Path) -> dict[str, str]:
    path = [*map(str, folders), str(SUPPORT), str(ROOT / "src"), str(ROOT)]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}


def _announce(folder: Path) -> Path:
    """A folder for PYTHONPATH with the entry points."""
    found = folder / "entry" / "baton_serve-0.dist-info"
    if found.exists():
        return found.parent  # a server may be reading
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-serve\nVersion: 0\n")
    (found / "entry_points.txt").write_text("[sglang.srt.plugins]\nbaton = baton.sglang:register\n" + KERNELS)
    return found.parent
