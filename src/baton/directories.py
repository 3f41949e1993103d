"""Directories and files that nobody else may put anything into: those of keys, and of stored KV.

Who can write to a key directory lets engines in; who can write to a store forges prefixes. So both are refused alike
when they are another user's, or open to others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from baton.errors import ConfigError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PREFIX, _LOCK = "baton-", ".lock"


def check_own(path: Path, field: str, closed: int = OTHERS_WRITE) -> os.stat_result:
    """The status of a file or directory that is this user's, or root's, and has none of the mode bits in `closed`.

    Raises `ConfigError` for `field` that says what is wrong and how to mend it, `OSError` when there is no such path.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(field, f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & closed:
        what = "read" if closed == OTHERS and not status.st_mode & OTHERS_WRITE else "written"
        mend = "go-rwx" if closed == OTHERS else "go-w"
        raise ConfigError(field, f"{path} may be {what} by others; chmod {mend} it")
    return status


def own_directory(path: Path, field: str) -> Path:
    """`path`, made for this user alone where there is none.

    Raises `ConfigError` as `check_own` does, `OSError` when it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path, field)
    return path


def own_secret(path: Path, field: str, make: Callable[[], bytes]) -> bytes:
    """The content of a file that its owner alone may read; where there is none, one is made with what `make` returns.

    Raises `ConfigError` as `check_own` does, `OSError` when it cannot be made or read.
    """
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(make())
        try:
            # Linked, not renamed: of two processes that start together the second must take the first's secret.
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    check_own(path, field, OTHERS)
    return path.read_bytes()


class RunDirectory:
    """A temporary directory of one run, for its user alone: `path`, which ends with `close`.

    One that SIGKILL has left, with its keys, is removed by the next run that makes one. A lock in it tells whose owner
    lives; the kernel lets go of it when the owner dies.
    """

    def __init__(self, kind: str = "") -> None:
        sweep_runs()
        # mkdtemp makes the directory for its owner only.
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}"))
        fresh = self.path / f"{_LOCK}.new"
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Others see the lock only when it is held.
        fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the directory and what is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep_runs() -> list[str]:
    """Remove this user's directories of runs whose process is dead, and return their names."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # no directory of a run, another user's, or its owner lives
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & OTHERS:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path.name)
            finally:
                os.close(lock)
    return removed
