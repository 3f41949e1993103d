"""A slice of `python -m tools.kernel_check`: every kernel against float64, under each allocator, on all threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.kernel_check.__main__ import ALLOCATORS, environment


@pytest.mark.timeout(1800)  # the first run compiles all kernels, on a loaded machine for minutes
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_compiled_kernels_agree_with_float64(allocator: str, tmp_path: Path) -> None:
    try:
        env = environment(allocator, str(tmp_path))
    except OSError:
        pytest.skip("no C compiler")
    shapes = ["--shapes", "6", "--seed", "1000000", "--threads", "2"]
    command = [sys.executable, "-m", "tools.kernel_check", *shapes, "--inside", allocator]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
