"""Imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Import PyTorch and what needs it in here, in a process of Baton's own.

    The garbage collector would look at all their objects again and again: imports take a fifth longer with it, and each
    full collection later would stop a running engine for a tenth of a second. Modules are never garbage, so the
    collector leaves out what exists at the end (`gc.freeze`).
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # Otherwise it would only keep garbage.
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()
