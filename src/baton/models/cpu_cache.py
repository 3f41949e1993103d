"""Compiled functions on disk that are never older than their sources.

Numba looks at the file of the function that it compiles, and at no other; but a function is compiled with all that it
calls from other files. Here a change in any of them makes its copy on disk void.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.ccallback import CFunc

# Numba's decorators and types have no types of their own.
_numba: Any = numba
_IMPORT = re.compile(r"^from (baton[\w.]*) import", re.MULTILINE)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """`function` by `numba.njit`, kept on disk."""
    dispatcher = _numba.njit(cache=True, **options)(function)
    _stamp(dispatcher._cache, function.__module__)
    return dispatcher


def callback(function: Callable[..., Any], signature: Any, **options: Any) -> Any:
    """As `numba.cfunc`, kept on disk."""
    made: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nopython": True, **options})
    made.enable_caching()
    _stamp(made._cache, function.__module__)
    made.compile()
    return made


def _stamp(cache: Any, module: str) -> None:
    # Without a folder that can be written to there is no file, and nothing to be outdated.
    if (file := getattr(cache, "_cache_file", None)) is not None:
        file._source_stamp = digest(module)


@functools.cache
def digest(module: str) -> str:
    """Of the file of `module` and of all modules of Baton's that it imports from, and these in turn."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_files(module)))).hexdigest()


def _files(module: str) -> set[Path]:
    found: set[Path] = set()
    names = [module]
    while names:
        spec = importlib.util.find_spec(names.pop())
        path = None if spec is None or spec.origin is None else Path(spec.origin)
        if path is not None and path not in found:
            found.add(path)
            names += _IMPORT.findall(path.read_text(encoding="utf-8"))
    return found
