"""The environment of SGLang's tests: CI uses a kept one, and installs none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.install_sglang import ROOT, recipe


def run(directory: Path) -> str:
    command = [sys.executable, str(ROOT / "tools" / "install_sglang.py"), "--if-kept", "--directory", str(directory)]
    done = subprocess.run([*command, "echo", "it ran"], capture_output=True, text=True, check=True, timeout=60)
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
