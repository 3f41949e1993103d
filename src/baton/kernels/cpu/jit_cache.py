"""A disk cache for Numba functions that any change in their sources invalidates.

Numba itself checks only the function's own file, and raises for damaged files and full disks. Processes write its index
and code without a lock: one could load old code.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.ccallback import CFunc

log = logging.getLogger(__name__)
# Numba's decorators and types are not annotated.
_numba: Any = numba
F = TypeVar("F", bound=Callable[..., Any])
_IMPORT = re.compile(r"^from (baton[\w.]*) import", re.MULTILINE)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    dispatcher = _numba.njit(cache=True, **options)(function)
    _stamp(dispatcher._cache, function.__module__)
    return dispatcher


def jit(function: F) -> F:
    """`numba.njit` without the GIL, with strict IEEE arithmetic and the disk cache."""
    return cast(F, compiled(function, nogil=True, error_model="numpy"))


def jit_inline(function: F) -> F:
    """Compiled within its one caller: LLVM optimises code anew for each level of calls."""
    return cast(F, compiled(function, nogil=True, error_model="numpy", inline="always"))


def jit_contract(function: F) -> F:
    """A multiply and an add may be fused (their order is kept)."""
    return cast(F, compiled(function, nogil=True, error_model="numpy", fastmath={"contract"}))


def callback(function: Callable[..., Any], signature: Any, **options: Any) -> Any:
    made: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nopython": True, **options})
    made.enable_caching()
    _stamp(made._cache, function.__module__)
    made.compile()
    return made


def _stamp(cache: Any, module: str) -> None:
    # None without a writable folder.
    if (file := getattr(cache, "_cache_file", None)) is not None:
        file._source_stamp = source_digest(module)
        cache.load_overload = functools.partial(_load, cache, cache.load_overload)
        cache.save_overload = functools.partial(_save, cache, cache.save_overload)


_turn = threading.RLock()
_locked: list[Path] = []


@contextlib.contextmanager
def _alone(cache: Any) -> Iterator[None]:
    """No other process reads or writes the cache's folder. Code that is loaded may load more."""
    folder = Path(cache.cache_path)
    with _turn, contextlib.ExitStack() as held:
        if folder not in _locked:
            # A folder that cannot be written does not change.
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                fcntl.flock(held.enter_context((folder / "numba.lock").open("a")), fcntl.LOCK_EX)
            _locked.append(folder)
            held.callback(_locked.remove, folder)
        yield


def _load(cache: Any, load: Callable[..., Any], *args: Any) -> Any:
    try:
        with _alone(cache):
            return load(*args)
    except Exception as error:  # a damaged pickle
        _warn_once(f"compiled code cannot be read: {error!r}")
        with contextlib.suppress(OSError):
            cache.flush()
        return None


def _save(cache: Any, save: Callable[..., None], *args: Any) -> None:
    try:
        with _alone(cache):
            save(*args)
    except OSError as error:
        _warn_once(f"compiled code is not kept for the next start: {error}")


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


@functools.cache
def source_digest(module: str) -> str:
    """A hash of the files of `module` and of all Baton modules that it imports, directly or not."""
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
