"""Imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


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
