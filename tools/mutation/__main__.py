"""`python -m tools.mutation --number 200 --seed 1`: draws mutants and runs each against its package's tests.

A mutant is killed if a test fails, or if the tests do not end in `LIMIT_CPU_S` of CPU time or `LIMIT_S`. Each runs in a
fork of this process, which has imported the libraries but nothing of Baton. Prints survivors; exits 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tools.mutation.mutants import Mutant, mutants

TESTS = {
    "src/baton/handoff/plan": ("tests/handoff/planning",),
    "src/baton/handoff/protocol": ("tests/handoff/protocol",),
    "src/baton/handoff/session": ("tests/handoff/session", "tests/handoff/test_agent.py"),
    "src/baton/kv": ("tests/kv",),
    "src/baton/kvstore": ("tests/kvstore",),
    "src/baton/router": ("tests/router",),
}
LIBRARIES = ("aiohttp.web", "hypothesis", "msgspec", "numba", "numpy", "prometheus_client", "torch", "xxhash", "zmq")
LIMIT_CPU_S, LIMIT_S = 120, 900


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        parts = mutant.path.relative_to("src").with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.name:
            return None
        package = self.mutant.path.name == "__init__.py"
        return importlib.util.spec_from_file_location(
            name, self.mutant.path, loader=self, submodule_search_locations=[str(self.mutant.path.parent)] * package
        )

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source(), str(self.mutant.path), "exec"), module.__dict__)


def survives(mutant: Mutant | None, tests: tuple[str, ...]) -> bool:
    """Whether all tests pass with the mutant, or without one. Blocks."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = _test(mutant, tests)
        os._exit(code)
    deadline = time.monotonic() + LIMIT_S
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.1)


def _test(mutant: Mutant | None, tests: tuple[str, ...]) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if mutant is not None:
        sys.meta_path.insert(0, Instead(mutant))
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of libraries that are imported before pytest begins
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *quiet, *tests]))


def _tests(path: Path) -> tuple[str, ...]:
    return next(tests for folder, tests in TESTS.items() if path.is_relative_to(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=list(TESTS), help="packages, or single files")
    parser.add_argument("--number", type=int, default=200, help="of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--no-baseline", action="store_true", help="do not first run the tests without a mutant")
    given = parser.parse_args()
    paths = [Path(folder) for folder in given.folders]
    files = sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))
    every = [mutant for file in files for mutant in mutants(file)]
    drawn = random.Random(given.seed).sample(every, min(given.number, len(every)))
    for library in LIBRARIES:
        importlib.import_module(library)
    for tests in () if given.no_baseline else sorted({_tests(mutant.path) for mutant in drawn}):
        if not survives(None, tests):
            sys.exit(f"{' '.join(tests)} fail without a mutant")
    started = time.monotonic()

    def run(mutant: Mutant) -> bool:
        alive = survives(mutant, _tests(mutant.path))
        print(f"{time.monotonic() - started:6.0f} s {'SURVIVED' if alive else 'killed'} {mutant}", flush=True)
        return alive

    with ThreadPoolExecutor(given.workers) as pool:
        alive = sum(pool.map(run, drawn))
    print(f"{len(drawn)} of {len(every)} mutants: {len(drawn) - alive} killed, {alive} survived (seed {given.seed})")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
