"""Imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Import PyTorch and packages that need it within this context, in a process of Baton's own.

    Modules are never garbage, but scanning them would make imports a fifth slower, and stop an engine for a tenth of a
    second at each full collection. So all objects are frozen at the end (`gc.freeze`).
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
