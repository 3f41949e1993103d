"""Check that the documented installation resolves on each Python that `pyproject.toml` promises.

    python -m tools.check_install                     runs pip's resolver, which installs nothing
    python -m tools.check_install --install 3.10      installs into a new environment, and runs a slice of tests there

A Python that is not on this machine is checked with `pip --python-version`: its wheels must exist, but markers are
evaluated for the newest Python on this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# What depends on versions of Python, transformers and aiohttp, and the pure half of the handoff: two minutes.
SLICE = (
    *("tests/cli", "tests/kv", "tests/text", "tests/parsing", "tests/openai/http"),
    "tests/handoff/planning/test_planner.py",
)
_PIP = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt")


def interpreter(version: str) -> str | None:
    """A Python of this version that can make environments: from the path, from pyenv, or this one."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    found = [sys.executable] if version == own else []
    for candidate in [*found, *map(str, pyenv), shutil.which(f"python{version}")]:
        if candidate and subprocess.run([candidate, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return candidate
    return None


def resolves(version: str, newest: str) -> tuple[bool, str]:
    """Whether pip finds a solution, and its message."""
    python = interpreter(version)
    flags = ["--dry-run", "--ignore-installed"]
    with tempfile.TemporaryDirectory() as target:
        if python is None:
            flags += ["--python-version", version, "--only-binary=:all:", "--target", target]
        what = [".[dev]"] if python is not None else _requirements()
        done = subprocess.run([python or newest, *_PIP, *flags, *what], cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    how = "resolved" if python is not None else "wheels exist (no such Python here)"
    return done.returncode == 0, how if done.returncode == 0 else "; ".join(errors)


def _requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # pip evaluates markers for the running Python, which is not the requested one.
    every = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [requirement for requirement in every if "python_version <" not in requirement]


def install_and_test(version: str) -> int:
    """Install as documented into a new environment, and run the slice there. Returns pytest's status, or 0 if there is
    no such Python.
    """
    python = interpreter(version)
    if python is None:
        print(f"{version}: not on this machine")
        return 0
    with tempfile.TemporaryDirectory(prefix="baton-install-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        own = f"{folder}/bin/python"
        subprocess.run([own, *_PIP, ".[dev]"], cwd=ROOT, check=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run([own, "-m", "pytest", "-q", *SLICE], cwd=ROOT, env=environment).returncode


def main() -> int:
    """Exit status 0 if everything requested succeeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", nargs="*", default=(), metavar="VERSION", help="install and test there")
    asked = parser.parse_args()
    if asked.install:
        return max(install_and_test(version) for version in asked.install)
    newest = next(found for version in reversed(VERSIONS) if (found := interpreter(version)) is not None)
    failed = False
    for version in VERSIONS:
        good, text = resolves(version, newest)
        failed |= not good
        print(f"{version}: {text}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
