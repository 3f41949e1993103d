"""`python -m tools.kernel_check`: random shapes through every kernel, under each allocator.

`guard` gives each allocation its own pages, and makes them inaccessible when it is freed (`guard_malloc.c`, which is
compiled with `cc`). `perturb` is glibc's allocator with `MALLOC_PERTURB_` and one arena. Each runs in its own process.
Exits with status 1 after a wrong value or a crash.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ALLOCATORS = ("guard", "perturb")
# Shapes of each family before the guard is on, enough for both dtypes and all branches that compile something.
_WARM_UP = 12


def environment(allocator: str, directory: str) -> dict[str, str]:
    """The environment for a process with the allocator. Raises `OSError` if there is no C compiler."""
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    if allocator == "perturb":
        return {**env, "MALLOC_PERTURB_": "85"}
    library = Path(directory) / "guard_malloc.so"
    source = Path(__file__).with_name("guard_malloc.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return {**env, "LD_PRELOAD": str(library)}


def run(allocator: str, names: list[str], shapes: int, seed: int, threads: int) -> int:
    """Run `shapes` random shapes of each family in this process. Returns the number of wrong ones."""
    import torch

    from tools.kernel_check.families import FAMILIES, guard

    torch.set_num_threads(threads)
    # Compiling allocates more blocks than the guard can have mappings, and threads are started once.
    for name in names if allocator == "guard" else ():
        for index in range(_WARM_UP):
            FAMILIES[name](np.random.default_rng(index))
    allocator_library = ctypes.CDLL(None) if allocator == "guard" else None
    if allocator_library is not None:
        guard.switch = allocator_library.guard_enable
        allocator_library.guard_used.restype = ctypes.c_size_t
    failed = 0
    for name in names:
        began = time.perf_counter()
        for index in range(seed, seed + shapes):
            try:
                FAMILIES[name](np.random.default_rng(index))
            except AssertionError as error:
                failed += 1
                print(f"{name} seed {index}: {error}", flush=True)
        print(f"{allocator:8} {name:9} {shapes} shapes in {time.perf_counter() - began:.1f} s", flush=True)
    if allocator_library is not None and allocator_library.guard_used() == 0:
        print("the guard allocator is not in force")
        return 1
    return failed


def main() -> int:
    from tools.kernel_check.families import FAMILIES

    parser = argparse.ArgumentParser(prog="python -m tools.kernel_check", description=__doc__)
    parser.add_argument(
        "--shapes",
        type=int,
        default=200,
        help="random shapes of each family; eight of rows for one of weights count once",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first shape")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--inside", choices=ALLOCATORS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return min(1, run(args.inside, args.families, args.shapes, args.seed, args.threads))
    with tempfile.TemporaryDirectory() as directory:
        for allocator in args.allocators:
            command = [sys.executable, "-m", "tools.kernel_check", *sys.argv[1:], "--inside", allocator]
            done = subprocess.run(command, env=environment(allocator, directory))
            if done.returncode:
                print(f"failed under {allocator}: status {done.returncode}")
                return 1
    print(f"0 failed: {args.shapes} shapes of {', '.join(args.families)}, {args.threads} threads")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
