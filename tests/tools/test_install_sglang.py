"""The environment of SGLang's tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.install_sglang import (
    CPU_DISK_BYTES,
    DISK_BYTES,
    ROOT,
    TORCH,
    CannotInstallError,
    install_torch,
    recipe,
    why_not,
)


def run(directory: Path) -> str:
    command = [sys.executable, str(ROOT / "tools" / "install_sglang.py"), "--if-kept", "--directory", str(directory)]
    done = subprocess.run([*command, "echo", "it ran"], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def test_an_environment_that_is_not_kept_is_not_installed_and_named(tmp_path: Path) -> None:
    directory = tmp_path / "sglang"
    assert run(directory) == f"skipped: {directory} does not hold SGLang 0.5.23 (make test-sglang installs it)\n"
    assert not directory.exists()
    directory.mkdir()
    (directory / "recipe").write_text("of another version")
    assert run(directory).startswith("skipped")
    (directory / "recipe").write_text(recipe())
    assert run(directory) == "it ran\n"


@pytest.mark.parametrize("known", range(len(TORCH)), ids=TORCH)
def test_the_first_build_of_pytorch_that_pip_knows_is_installed(known: int) -> None:
    asked: list[str] = []

    def pip(requirement: str, quiet: bool) -> None:
        asked.append(requirement)
        assert quiet == ("+cpu" in requirement), "only the last failure is pip's to explain"
        if len(asked) <= known:
            raise CannotInstallError("unknown")

    install_torch(pip, DISK_BYTES)
    assert asked == [f"torch=={build}" for build in TORCH[: known + 1]]


def test_cudas_libraries_are_not_installed_on_a_disk_that_they_would_fill() -> None:
    def pip(requirement: str, quiet: bool) -> None:
        assert "+cpu" in requirement
        raise CannotInstallError("unknown")

    with pytest.raises(CannotInstallError, match="no build of PyTorch for CPUs, and 6 GB of disk are free, 16 GB"):
        install_torch(pip, CPU_DISK_BYTES)


@pytest.mark.parametrize(
    ("python", "machine", "free", "why"),
    [
        ((3, 10), "x86_64", CPU_DISK_BYTES, "needs Python 3.11 to 3.13, this is 3.10"),
        ((3, 11), "aarch64", CPU_DISK_BYTES, "Linux on aarch64"),
        ((3, 11), "x86_64", CPU_DISK_BYTES - 10**9, "5 GB of disk are free, 6 GB are needed"),
    ],
)
def test_a_machine_that_cannot_have_it_is_told_why(python: tuple[int, int], machine: str, free: int, why: str) -> None:
    assert why in str(why_not(python, "Linux", machine, free))
    assert why_not((3, 13), "Linux", "x86_64", CPU_DISK_BYTES) is None
