"""Compiled functions on disk are reused, but only while all their sources are unchanged."""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from baton.kernels.cpu import jit_cache

_INNER = """\
from baton.kernels.cpu.jit_cache import jit

@jit
def number():
    return {number}
"""
_OUTER = """\
from baton_probe.inner import number
from baton.kernels.cpu.jit_cache import jit

@jit
def twice():
    return 2 * number()
"""


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


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="who waits for a lock is read from /proc")
def test_a_process_waits_while_another_has_the_cache(answer: Answer, tmp_path: Path) -> None:
    """It could load code that the other is about to replace."""
    assert answer(3) == (6, 0)
    (lock,) = (tmp_path / "cache").rglob("numba.lock")
    program = "from baton_probe.outer import twice; print(twice())"
    found = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-c", program], env=found, stdout=subprocess.PIPE, text=True) as other:
            waits = f"-> FLOCK  ADVISORY  WRITE {other.pid} "
            until = time.monotonic() + 60
            while waits not in Path("/proc/locks").read_text():
                assert other.poll() is None
                assert time.monotonic() < until
                time.sleep(0.01)
            fcntl.flock(held, fcntl.LOCK_UN)
            assert other.communicate(timeout=60)[0] == "6\n"
