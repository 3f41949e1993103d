"""Imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

from baton.errors import ConfigError


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Import PyTorch and packages that need it within this context, in a process of Baton's own.

    Modules are never garbage, but the collector would scan their objects: imports would take a fifth longer, and each
    later full collection would stop an engine for a tenth of a second. So objects that exist at the end are frozen
    (`gc.freeze`).
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # If no module was imported, freezing would only keep garbage.
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()


def check_kernel_cache() -> None:
    """Raises `ConfigError` if Numba could not import kernels: no directory for compiled code can be written."""
    import numba

    compiled: Any = numba.njit(cache=True)
    try:
        compiled(_cached_beside_the_package)
    except RuntimeError:
        what = "names no directory that can be written, nor can the package's or the user's: compiled code needs one"
        raise ConfigError("NUMBA_CACHE_DIR", what) from None


def _cached_beside_the_package() -> None: ...
