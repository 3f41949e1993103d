"""Compiled functions on disk are reused, but only while all their sources are unchanged."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO
from unittest import mock

import numba
import numpy as np
import pytest

from baton import jit_cache
from testkit.processes.leftovers import open_files

_INNER = """\
from baton.jit_cache import jit

@jit
def number():
    return {number}
"""
_OUTER = """\
from baton_probe.inner import number
from baton.jit_cache import jit

@jit
def twice():
    return 2 * number()
"""


_PROGRAM = "from baton_probe.outer import twice; print(twice(), sum(twice.stats.cache_hits.values()))"
Answer = Callable[[int], tuple[int, int]]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    package = tmp_path / "baton_probe"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "outer.py").write_text(_OUTER)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))

    def answer(number: int) -> tuple[int, int]:
        """The result in a new process, and whether it came from disk."""
        (package / "inner.py").write_text(_INNER.format(number=number))
        for name in [name for name in sys.modules if name.startswith("baton_probe")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        jit_cache.source_digest.cache_clear()
        twice = importlib.import_module("baton_probe.outer").twice
        return twice(), sum(twice.stats.cache_hits.values())

    return answer


def test_a_change_in_another_file_is_seen(answer: Answer) -> None:
    assert answer(3) == (6, 0)
    assert answer(3) == (6, 1)
    assert answer(4) == (8, 0)
    assert answer(3) == (6, 1), "each version of the sources has code of its own"


def test_another_checkout_of_the_same_sources_uses_the_code(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(3) == (6, 0)
    other = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "baton_probe", other / "baton_probe")
    monkeypatch.syspath_prepend(str(other))
    assert answer(3) == (6, 1)
    assert Path(str(sys.modules["baton_probe.outer"].__file__)).is_relative_to(other)


def test_code_of_another_version_of_numpy_is_not_used(answer: Answer) -> None:
    """Numba's types follow NumPy's."""
    assert answer(3) == (6, 0)
    with mock.patch.object(np, "__version__", "1.26.4"):
        assert answer(3) == (6, 0)


@pytest.mark.parametrize("damage", [b"", b"\x80", b"no pickle"])
@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
def test_a_damaged_file_is_replaced(answer: Answer, tmp_path: Path, pattern: str, damage: bytes) -> None:
    assert answer(3) == (6, 0)
    for file in [*(tmp_path / "cache").rglob(pattern)]:
        file.write_bytes(damage)
    assert answer(3) == (6, 0)
    assert answer(3) == (6, 1)


def test_what_cannot_be_written_is_compiled_again(answer: Answer, tmp_path: Path) -> None:
    assert answer(3) == (6, 0)
    for file in [*(tmp_path / "cache").rglob("*.nbi")]:
        file.unlink()
        file.mkdir()
    assert answer(3) == (6, 0)
    assert answer(3) == (6, 0)


def environment(tmp_path: Path) -> dict[str, str]:
    """Of another process with the cache."""
    found = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**found, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def compiling(answer: Answer, tmp_path: Path) -> Iterator[tuple[TextIO, subprocess.Popen[str], list[Path]]]:
    """The lock of `twice`, held; a process that needs it, and prints as `answer`; its code, renamed."""
    assert answer(3) == (6, 0)
    (path,) = (tmp_path / "cache").resolve().rglob("outer.twice*.lock")
    code = [*path.parent.glob("*.nb[ic]")]
    for file in code:
        file.rename(file.with_suffix(file.suffix + ".later"))
    command, env = [sys.executable, "-c", _PROGRAM], environment(tmp_path)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as other:
            until = time.monotonic() + 60
            while str(path) not in open_files(other.pid):
                assert other.poll() is None
                assert time.monotonic() < until
                time.sleep(0.01)
            yield lock, other, code


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what a process waits for is read from /proc")
def test_a_process_waits_while_another_compiles_and_loads_its_code(
    compiling: tuple[TextIO, subprocess.Popen[str], list[Path]],
) -> None:
    """It would compile the same, and could load code that the other is about to replace."""
    lock, other, code = compiling
    for file in code:
        file.with_suffix(file.suffix + ".later").rename(file)
    fcntl.flock(lock, fcntl.LOCK_UN)
    assert other.communicate(timeout=60)[0] == "6 1\n"


def test_a_function_that_another_process_keeps_locked_is_compiled_without_the_disk(
    answer: Answer, tmp_path: Path
) -> None:
    """The other may have been stopped."""
    assert answer(3) == (6, 0)
    (path,) = (tmp_path / "cache").rglob("outer.twice*.lock")
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("outer.twice*.nb?")}
    impatient = "from baton import jit_cache; jit_cache._MOST_WAIT_S = 0.0; " + _PROGRAM
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command, env = [sys.executable, "-c", impatient], environment(tmp_path)
        assert subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True).stdout == "6 0\n"
    assert {file: file.stat().st_mtime_ns for file in written} == written, "the process has replaced the code"


def test_a_stopped_process_is_waited_for_once_however_many_functions_it_keeps(answer: Answer, tmp_path: Path) -> None:
    assert answer(3) == (6, 0)
    locks = [*(tmp_path / "cache").rglob("*.lock")]
    assert len(locks) == 2, "a function and the one that it calls"
    # Sleeping takes no time.
    clock = (
        "from types import SimpleNamespace; from baton import jit_cache; slept = []; "
        "jit_cache.time = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append); "
    )
    command = [sys.executable, "-c", f"{clock}{_PROGRAM}; print(round(sum(slept)))"]
    with contextlib.ExitStack() as held:
        for path in locks:
            fcntl.flock(held.enter_context(path.open("a")), fcntl.LOCK_EX)
        done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.split() == ["6", "0", "120"]
    assert done.stderr.count("compiling without it") == 1
