"""Run a command with the Python files of a vLLM that has no build for CPUs, over the environment of `install_vllm.py`:
its schedulers, KV-cache managers and connector classes run, its models do not.

    python tools/vllm_python.py --version 0.33.0 python -m pytest tests/vllm/integration/test_own_scheduler.py

The wheel of PyPI (330 MB) is downloaded once; its Python files are kept in the user's cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

INSTALLER = Path(__file__).with_name("install_vllm.py")


def python_files(directory: Path, version: str) -> None:
    """Put the Python files of a wheel into `directory`. Raises `subprocess.CalledProcessError` when pip fails."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "-d", folder, f"vllm=={version}"], check=True)
        found = Path(folder) / "files"
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(found, [name for name in wheel.namelist() if name.endswith((".py", ".json"))])
        found.rename(directory)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.33.0", help="of vllm on PyPI")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    args = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "baton" / f"vllm-python-{args.version}"
    if not directory.exists():
        python_files(directory, args.version)
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # the wheel's own name says CUDA
    os.execv(sys.executable, [sys.executable, str(INSTALLER), *args.command])


if __name__ == "__main__":
    main()
