"""The OpenMP teams of an engine's process: one thread per core, and no unused team.

`bind_team`: Linux may wake both threads on one core and leave them there for 60 ms. Larger teams are not bound: later
threads would inherit their parent's core. Nor are engines that share cores (`up` sets `OMP_PROC_BIND` to false): bound
threads would wait for each other while a core idles.

`end_team`: libgomp lets all threads sleep after each parallel region if they are more than the cores
(`gomp_throttled_spin_count_var`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from baton.kernels.cpu.omp import gomp_parallel

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_THREADS = 2
_PAUSE_SOFT = 1


def bind_team() -> bool:
    """Bind the calling thread's team, itself included. Returns False if it is not bound.

    Not with more than two cores, since engines of one host must not bind to the same ones, nor if `OMP_PROC_BIND` is
    set (OpenMP 5.2, 21.2).
    """
    if os.environ.get("OMP_PROC_BIND"):
        return False
    team = gomp_parallel()
    if team is None or torch.get_num_threads() != _THREADS or not hasattr(os, "sched_setaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != _THREADS:
        return False
    leader = threading.get_native_id()

    def bind(_: object) -> None:
        with contextlib.suppress(OSError):  # forbidden in some sandboxes
            os.sched_setaffinity(0, {cores[threading.get_native_id() != leader]})

    team(_CALLBACK(bind), None, _THREADS, 0)
    return True


def _libgomp() -> object:
    return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)


def end_team(libgomp: Callable[[], Any] = _libgomp) -> bool:
    """End the calling thread's team; its next parallel region makes a new one. Returns whether that was done.

    `omp_pause_resource_all` (OpenMP 5.2, 18.6.2), not within a parallel region.
    """
    if gomp_parallel() is None:
        return False
    try:
        pause = libgomp().omp_pause_resource_all
    except AttributeError:  # before GCC 9
        return False
    return bool(pause(_PAUSE_SOFT) == 0)
