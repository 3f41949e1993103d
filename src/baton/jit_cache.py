"""A disk cache for Numba functions that any change in their sources invalidates.

Numba checks only the function's own file, raises for damaged files and full disks, and locks nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from baton.errors import ConfigError

log = logging.getLogger(__name__)
# Numba has no annotations.
_numba: Any = numba
F = TypeVar("F", bound=Callable[..., Any])
_MOST_WAIT_S, _TOLD_AFTER_S = 120.0, 5.0
_IMPORT = re.compile(r"^from (baton[\w.]*) import", re.MULTILINE)


def compiled(function: Callable[..., Any], signature: Any = None, **options: Any) -> Any:
    """With a `signature`, compiled now. Raises `ConfigError` if no directory for code can be written."""
    dispatcher = _numba.njit(**options)(function)
    _keep(dispatcher, function.__module__)
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


def jit(function: F) -> F:
    """`numba.njit` without the GIL, with strict IEEE arithmetic and the disk cache."""
    return cast(F, compiled(function, nogil=True, error_model="numpy"))


def jit_inline(function: F) -> F:
    """Compiled within its callers: LLVM optimises code anew for each level of calls."""
    return cast(F, compiled(function, nogil=True, error_model="numpy", inline="always"))


def jit_contract(function: F) -> F:
    """A multiply and an add may be fused (their order is kept)."""
    return cast(F, compiled(function, nogil=True, error_model="numpy", fastmath={"contract"}))


def callback(function: Callable[..., Any], signature: Any, **options: Any) -> Any:
    made: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nopython": True, **options})
    _keep(made, function.__module__)
    made.compile()
    return made


def _keep(function: Any, module: str) -> None:
    try:
        function.enable_caching()
    except RuntimeError:
        what = "names no directory that can be written, nor can the package's or the user's: compiled code needs one"
        raise ConfigError("NUMBA_CACHE_DIR", what) from None
    cache = function._cache
    _place(cache, module)
    cache.load_overload = functools.partial(_load, cache, cache.load_overload)
    cache.save_overload = functools.partial(_save, cache, cache.save_overload)
    function.compile = functools.partial(_compile, _lock_file(cache), function.compile)


def _place(cache: Any, module: str) -> None:
    """Beside the sources, or in a folder named by their content, which all checkouts share."""
    folder, digest = Path(cache.cache_path), source_digest(module)
    if folder.name != "__pycache__":
        versions = hashlib.sha256(f"{digest} {_numba.__version__} {np.__version__}".encode())
        folder = folder.with_name(f"{module}-{versions.hexdigest()[:16]}")
    cache._cache_path = cache._impl.locator._cache_path = str(folder)
    cache._cache_file = type(cache._cache_file)(str(folder), cache._impl.filename_base, digest)


def _lock_file(cache: Any) -> Path:
    return Path(cache._cache_file._index_path).with_suffix(".lock")


# Locks that this process holds: only it uses their index and code.
_locked: set[Path] = set()
# Locks waited for in vain.
_stuck: set[Path] = set()


def _compile(lock: Path, compile_it: Callable[..., Any], *args: Any) -> Any:
    """Others wait, and load the code."""
    with global_compiler_lock, contextlib.ExitStack() as held:
        if lock not in _locked and _take(lock, held):
            _locked.add(lock)
            held.callback(_locked.remove, lock)
        return compile_it(*args)


def _take(lock: Path, held: contextlib.ExitStack) -> bool:
    """Lock until the end of `held`. False if another process keeps it."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(lock.open("a"))
    except OSError:
        return True  # an unwritable folder does not change
    began, pause = time.monotonic(), 0.001
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _is_stuck(lock, time.monotonic() - began):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        except OSError:
            return True
        else:
            # A fork may keep the file open.
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)
            return True


def _is_stuck(lock: Path, waited_s: float) -> bool:
    if waited_s > _TOLD_AFTER_S:
        _log_once(
            logging.INFO, f"waiting up to {_MOST_WAIT_S:.0f} s for a kernel that another process compiles ({lock})"
        )
    if waited_s > _MOST_WAIT_S:
        _stuck.add(lock)
        _log_once(
            logging.WARNING, f"another process, perhaps a stopped one, does not release {lock}: compiling without it"
        )
    return bool(_stuck)


def _load(cache: Any, load: Callable[..., Any], *args: Any) -> Any:
    if _lock_file(cache) not in _locked:
        return None
    try:
        return load(*args)
    except Exception as error:  # a damaged pickle
        _log_once(logging.WARNING, f"compiled code cannot be read: {error!r}")
        with contextlib.suppress(OSError):
            cache.flush()
        return None


def _save(cache: Any, save: Callable[..., None], *args: Any) -> None:
    if _lock_file(cache) not in _locked:
        return
    try:
        save(*args)
    except OSError as error:
        _log_once(logging.WARNING, f"compiled code is not kept for the next start: {error}")


@functools.cache
def _log_once(level: int, text: str) -> None:
    log.log(level, "%s", text)


@functools.cache
def source_digest(module: str) -> str:
    """A hash of `module` and all Baton modules that it imports, directly or not."""
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
