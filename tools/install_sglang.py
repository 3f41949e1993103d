"""Run a command with SGLang for CPUs; its environment is made by the first run and kept for later ones.

    python tools/install_sglang.py [--directory DIR] python -m pytest tests/sglang
    python tools/install_sglang.py            makes the environment only, and prints where it is

The environment lies in the user's cache and is made anew when its recipe (versions, constraints, Baton's dependencies)
is another, or when an earlier run was interrupted. Other runs wait for it.

SGLang's wheel requires libraries for GPUs that a CPU does not use; they are left out. It also imports `sgl_kernel`,
which PyPI has for CUDA only, and `torchvision`: `tests/sglang/support` holds stand-ins. PyTorch's build for CPUs is
taken if pip knows one (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS): PyPI's needs 4 GB more.

With --or-skip, a machine that cannot have the environment is named on one line, and the exit status is 0. With
--if-kept, nothing is installed: if no earlier run has left the environment, one line says so.
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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = Path(__file__).with_name("constraints-sglang.txt")
VERSION = "0.5.23"
NIXL, MOONCAKE = "1.5.1", "0.3.13.post1"
TESTS = ("pytest", "pytest-timeout", "pytest-asyncio")
# Requirements that only a GPU, images, sound, other services or a notebook need. SGLang starts without them.
NOT_FOR_CPU = frozenset(
    {
        "anthropic",
        "apache-tvm-ffi",
        "blobfile",
        "build",
        "cuda-python",
        "datasets",
        "deepseek-recipe",
        "flash-attn-4",
        "flashinfer_python",
        "humming-kernels",
        "kernels",
        "mistral_common",
        "modelscope",
        "nvidia-cutlass-dsl",
        "nvidia-mathdx",
        "nvidia-ml-py",
        "nvshmem4py-cu13",
        "py-spy",
        "quack-kernels",
        "scipy",
        "sgl-deep-ep",
        "sgl-deep-gemm",
        "sgl-flash-mla",
        "sglang-kernel",
        "smg-grpc-servicer",
        "tilelang",
        "timm",
        "tml-renderers",
        "torch_memory_saver",
        "torch",
        "torchaudio",
        "torchcodec",
        "torchvision",
    }
)
# Modules that SGLang imports without requiring them by these names.
IMPORTED = ("dill", "triton")
# Builds of PyTorch, the first that pip finds. SGLang asks for the last one.
TORCH = ("2.14.1+cpu", "2.13.0+cpu", "2.14.1")
DISK_BYTES = 16 * 10**9  # the environment with CUDA's libraries, pip's cache, and wheels that are unpacked
CPU_DISK_BYTES = 6 * 10**9  # with a build of PyTorch for CPUs
MAX_INSTALL_S = 360.0


class CannotInstallError(Exception):
    """This machine cannot have the environment; the text says why."""


def why_not(python: tuple[int, int], system: str, machine: str, free_bytes: int) -> str | None:
    """What keeps SGLang's environment from being made here; None if nothing does."""
    if not (3, 11) <= python <= (3, 13):
        return f"SGLang {VERSION} needs Python 3.11 to 3.13, this is {python[0]}.{python[1]} (make PYTHON=...)"
    if system != "Linux" or machine != "x86_64":
        return f"SGLang for CPUs is tested on Linux on x86_64, this is {system} on {machine}"
    return _too_full(free_bytes, CPU_DISK_BYTES) if free_bytes < CPU_DISK_BYTES else None


def _too_full(free_bytes: int, needed: int) -> str:
    return f"{free_bytes / 1e9:.0f} GB of disk are free, {needed / 1e9:.0f} GB are needed while it is installed"


def own_requirements() -> list[str]:
    """What Baton itself depends on."""
    import tomllib

    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, as lines for pip, without `NOT_FOR_CPU` and extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    names = [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines]
    return [line for line, name in zip(lines, names, strict=True) if name not in NOT_FOR_CPU]


def recipe() -> str:
    """A digest of everything that decides what is installed."""
    parts = [VERSION, NIXL, MOONCAKE, sys.version, *own_requirements(), *TESTS, *IMPORTED, *TORCH, *sorted(NOT_FOR_CPU)]
    parts.append(CONSTRAINTS.read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _run(command: Sequence[str], until: float, quiet: bool = False) -> None:
    """Run pip, and end it and its children at `until`. Raises `CannotInstallError` if it fails or takes longer."""
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL if quiet else None)
    try:
        code = process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise CannotInstallError("pip took too long (--limit)") from None
    if code:
        raise CannotInstallError(f"pip failed: {' '.join(command[2:6])} ..., see above")


def install_torch(pip: Callable[[str, bool], None], free_bytes: int) -> None:
    """`pip` installs a requirement, maybe silently. Raises `CannotInstallError`."""
    for build in TORCH[:-1]:
        with contextlib.suppress(CannotInstallError):  # unless time is up, pip knows no such build
            return pip(f"torch=={build}", True)
    if free_bytes < DISK_BYTES:
        raise CannotInstallError(f"pip knows no build of PyTorch for CPUs, and {_too_full(free_bytes, DISK_BYTES)}")
    return pip(f"torch=={TORCH[-1]}", False)


def install(directory: Path, limit_s: float) -> None:
    """Make the environment. Raises `CannotInstallError`, also if it takes more than `limit_s` seconds."""
    until = time.monotonic() + limit_s
    venv.create(directory, with_pip=True, clear=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        _run([*pip, "download", "--no-deps", "-d", folder, f"sglang=={VERSION}"], until)
        wheel = next(Path(folder).glob("*.whl"))
        torch = [*pip, "install", "-c", str(CONSTRAINTS)]
        free = shutil.disk_usage(directory).free
        install_torch(lambda requirement, quiet: _run([*torch, requirement], until, quiet), free)
        listed = Path(folder) / "requirements.txt"
        extra = [f"nixl-cu13=={NIXL}", f"mooncake-transfer-engine-non-cuda=={MOONCAKE}", *IMPORTED, *TESTS]
        listed.write_text("\n".join([*requirements(wheel), *own_requirements(), *extra]) + "\n")
        _run([*pip, "install", "-c", str(CONSTRAINTS), "-r", str(listed)], until)
        _run([*pip, "install", "--no-deps", str(wheel), f"nixl=={NIXL}"], until)


def is_made(directory: Path) -> bool:
    """Whether it holds an environment of today's recipe."""
    stamp = directory / "recipe"
    return stamp.exists() and stamp.read_text() == recipe()


@contextlib.contextmanager
def environment(directory: Path, limit_s: float = MAX_INSTALL_S) -> Iterator[int]:
    """Have the environment in `directory`, for as long as the file descriptor is open that comes with it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not is_made(directory):
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another run may have made it while this one waited.
            if not is_made(directory):
                free = shutil.disk_usage(directory.parent).free
                reason = why_not(sys.version_info[:2], platform.system(), platform.machine(), free)
                if reason is not None:
                    raise CannotInstallError(reason)
                print(f"installing SGLang {VERSION} for CPUs into {directory} ...", file=sys.stderr, flush=True)
                (directory / "recipe").unlink(missing_ok=True)
                try:
                    install(directory, limit_s)
                except CannotInstallError:
                    shutil.rmtree(directory, ignore_errors=True)
                    raise
                (directory / "recipe").write_text(recipe())
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield lock.fileno()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="of the environment; default: the user's cache")
    parser.add_argument("--or-skip", action="store_true", help="exit with 0, and say why, if it cannot be made")
    parser.add_argument("--if-kept", action="store_true", help="exit with 0, and say so, if it is not there yet")
    parser.add_argument("--limit", type=float, default=MAX_INSTALL_S, help="seconds that pip may take")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with the environment first in PATH")
    args = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (args.directory or cache / "baton" / f"sglang-{VERSION}").absolute()
    if args.if_kept and not is_made(directory):
        print(f"skipped: {directory} does not hold SGLang {VERSION} (make test-sglang installs it)")
        return
    try:
        with environment(directory, args.limit) as lock:
            if not args.command:
                print(directory)
                return
            os.set_inheritable(lock, True)
            os.environ["PATH"] = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
            os.execvp(args.command[0], args.command)
    except CannotInstallError as error:
        message = f"SGLang {VERSION} cannot be installed: {error}"
        if not args.or_skip:
            sys.exit(message)
        print(f"skipped: {message}")


if __name__ == "__main__":
    main()
