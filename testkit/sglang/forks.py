"""Starts SGLang servers as forks of this process (`testkit.processes.forks`).

SGLang spawns three or four processes for each server, and each imports all of it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker

from baton.children import die_with_parent
from testkit.processes.forks import fork_on_order

# All of a server's processes, all models, and the plug-in.
MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry", "baton.sglang.conn")


def _import_sglang() -> None:
    for name in MODULES:
        importlib.import_module(name)


def _keep_forking(method: str, force: bool = False) -> None:
    """SGLang would choose to spawn."""


def _serve(arguments: Sequence[str]) -> None:
    die_with_parent(signal.SIGKILL)
    # Removes the shared memory that the server and its children leave.
    resource_tracker.ensure_running()
    sys.argv = ["sglang.launch_server", *arguments]
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_forking  # type: ignore[assignment]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    fork_on_order(_import_sglang, _serve)
