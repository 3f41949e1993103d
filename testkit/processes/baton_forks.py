"""Processes of Baton as forks of one that has imported an engine: its imports take most of the start of a small model.

`python -m testkit.processes.baton_forks` is that process. A fork has what a new process has: arguments, an environment,
open files, and an exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from testkit.processes.commands import prepare_commands
from testkit.processes.forks import fork_here, fork_on_order
from testkit.processes.launcher import Forked, Launcher, Order, Starter

# Forked are `python -m MODULE` and `python -c "from MODULE import ..."`.
FORKED = (
    "baton.cli",
    "baton.engine.ranks.worker",
    "baton.testing.transport_peer",
    "benchmarks.topologies.data_rank",
    "testkit.servers.fake_baton",
)
# What they import, and models of tests.
MODULES = (
    "baton.cli",
    "baton.engine.async_engine",
    "baton.engine.llm",
    "baton.models.architectures.llama",
    "baton.drafters.eagle3",
    "baton.router.app",
    "baton.server.app",
    "baton.server.run",
    "baton.testing.transport_peer",
    "testkit.servers.fake_serving",
)
# Those of `subprocess.Popen` that forks have.
_OPTIONS = {"stdin", "stdout", "stderr", "env", "pass_fds", "start_new_session", "text"}
# Read when PyTorch is imported.
_THREADS = {"OMP_NUM_THREADS": "1"}
popen = subprocess.Popen


def launcher() -> Launcher:
    return Launcher([sys.executable, "-m", __name__], {**os.environ, **_THREADS})


@contextlib.contextmanager
def forking(starter: Starter) -> Iterator[None]:
    """In this context `subprocess.Popen` forks processes of Baton that compute with one thread."""
    with mock.patch.object(subprocess, "Popen", functools.partial(_start, starter)):
        yield


def _start(starter: Starter, command: Sequence[str], **options: Any) -> Forked | subprocess.Popen[bytes]:
    if not _is_known(command, options):
        return popen(command, **options)
    with contextlib.ExitStack() as theirs:
        ours, files = {}, dict[int, int]()
        for number, name, mode in ((0, "stdin", "w"), (1, "stdout", "r"), (2, "stderr", "r")):
            file = options.get(name)
            if file == subprocess.PIPE:
                read, write = os.pipe()
                files[number], kept = (read, write) if mode == "w" else (write, read)
                theirs.callback(os.close, files[number])
                ours[name] = os.fdopen(kept, mode if options.get("text") else f"{mode}b")
            elif file == subprocess.STDOUT:
                files |= {number: files[1]} if 1 in files else {}
            elif file != subprocess.DEVNULL:
                files[number] = number if file is None else file if isinstance(file, int) else file.fileno()
        files |= {number: number for number in options.get("pass_fds", ())}
        environment = {**(options.get("env") or os.environ)}
        order = Order(arguments=[*command[1:]], environment=environment, alone=True, numbers=[*files])
        process = starter.start(order, [*files.values()])
    process.stdin, process.stdout, process.stderr = (ours.get(name) for name in ("stdin", "stdout", "stderr"))
    return process


def _is_known(command: Sequence[str], options: dict[str, Any]) -> bool:
    environment = options.get("env") or os.environ
    if options.keys() - _OPTIONS or any(environment.get(name) != value for name, value in _THREADS.items()):
        return False
    if command[:1] != [sys.executable]:
        return False
    how, what = (*_after_flags(command[1:]), "", "")[:2]
    return what in FORKED if how == "-m" else how == "-c" and what.startswith(tuple(f"from {m} " for m in FORKED))


def _after_flags(arguments: Sequence[str]) -> list[str]:
    return [*arguments[1:]] if arguments[:1] == ["-P"] else [*arguments]


def _import_engine() -> None:
    for name in MODULES:
        importlib.import_module(name)
    prepare_commands()


def _run(arguments: list[str]) -> None:
    """As `python`. What it starts are forks of what it is now."""
    how, what, *rest = _after_flags(arguments)
    sys.argv = [what if how == "-m" else how, *rest]
    tempfile.tempdir = None  # of another environment
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    try:
        with contextlib.ExitStack() as stack:
            if _starts_processes(arguments):
                stack.enter_context(forking(stack.enter_context(fork_here(_run))))
            if how == "-m":
                runpy.run_module(what, run_name="__main__")
            else:
                exec(what, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


def _starts_processes(arguments: list[str]) -> bool:
    """For others a second fork would be for nothing."""
    return not {"up", "verify"}.isdisjoint(arguments) or any("parallel-size" in text for text in arguments)


if __name__ == "__main__":
    fork_on_order(_import_engine, _run)
