"""vLLM servers as forks of one process that has imported vLLM (`testkit.processes.forks`), and that process.

On CPUs each server's API, engine and workers are processes that import vLLM anew, which takes most of the time to start
a small model.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType

from benchmarks.vllm import servers
from testkit.processes.forks import fork_on_order
from testkit.processes.launcher import Launcher, Order, Process

# What the processes of a server import, and the models of most tests.
MODELS = ("llama", "llama_eagle3", "deepseek_v2", "deepseek_mtp", "glm4_moe", "glm4_moe_mtp", "qwen3_next")
MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    *(f"vllm.model_executor.models.{name}" for name in MODELS),
    "baton.vllm.connector",
)


class Forks:
    """`launch` takes the place of `servers.launch`."""

    def __init__(self) -> None:
        self._environment = servers.environment_of({})
        command = [sys.executable, "-m", __name__]
        self._launcher = Launcher(command, {**os.environ, **self._environment})

    def launch(self, python: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """A server that imports other files (PYTHONPATH) is started by vLLM's own command."""
        if python != sys.executable or environment["PYTHONPATH"] != self._environment["PYTHONPATH"]:
            return servers.spawn(python, arguments, environment, log)
        return self.run(servers.API_SERVER, arguments, environment, log)

    def run(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """As `python -m module`."""
        return self._launcher.start(Order(arguments=[module, *arguments], environment={**environment}, log=str(log)))

    def close(self) -> None:
        """End what still runs."""
        self._launcher.close()


def _import_vllm() -> None:
    for name in MODULES:
        importlib.import_module(name)


class _OtherModules:
    """`sys` for vLLM's search for kernels to replace, which fails at llvmlite's functions. vLLM's own processes import
    llvmlite later.
    """

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if not name.startswith("llvmlite")}


def _serve(arguments: Sequence[str]) -> None:
    # Removes the shared memory that the server and its children leave. vLLM kills one that a child starts.
    resource_tracker.ensure_running()
    fork = multiprocessing.get_context("fork")
    # vLLM asks for "spawn" on CPUs.
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")
    dispatcher.__dict__["sys"] = _OtherModules()
    sys.argv = [*arguments]
    runpy.run_module(arguments[0], run_name="__main__")


if __name__ == "__main__":
    fork_on_order(_import_vllm, _serve)
