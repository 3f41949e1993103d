"""Files that only this user may write to: keys, and stored KV, whose writers could forge prefixes."""

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
    """Raises `ConfigError` for `field` unless this user or root owns `path` and its mode has no bit of `closed`, and
    `OSError` if it does not exist."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(field, f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & closed:
        what = "read" if closed == OTHERS and not status.st_mode & OTHERS_WRITE else "written"
        mend = "go-rwx" if closed == OTHERS else "go-w"
        raise ConfigError(field, f"{path} may be {what} by others; chmod {mend} it")
    return status


def own_directory(path: Path, field: str) -> Path:
    """A new directory is for this user only. Raises the errors of `check_own`, and `OSError`."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path, field)
    return path


def own_secret(path: Path, field: str, make: Callable[[], bytes]) -> bytes:
    """A file that only its owner may read. A missing one is created with the result of `make`.

    Raises `ConfigError` for `field`.
    """
    try:
        return _own_secret(path, field, make)
    except OSError as error:
        raise ConfigError(field, f"{path}: {error.strerror}") from None


def _own_secret(path: Path, field: str, make: Callable[[], bytes]) -> bytes:
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(make())
            # Of two processes that start together, the second must use the first one's secret.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    check_own(path, field, OTHERS)
    return path.read_bytes()


class RunDirectory:
    """A temporary directory for one run and one user.

    After SIGKILL it stays, with its keys, until the next run creates one. A file lock shows whether its owner lives;
    without one the name is hidden.

    Raises `ConfigError`.
    """

    def __init__(self, kind: str = "") -> None:
        self._locks: list[int] = []
        try:
            sweep_runs()
            while not self._locks:
                self.path = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{kind}"))
                with contextlib.suppress(FileNotFoundError):  # swept meanwhile
                    self._take()
        except OSError as error:
            if hasattr(self, "path"):
                self.close()
            raise ConfigError("TMPDIR", f"a directory for temporary files is needed: {error}") from None

    def _take(self) -> None:
        locks = [os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)]
        try:
            fcntl.flock(locks[0], fcntl.LOCK_EX)
            # Or systemd-tmpfiles removes it after ten days.
            locks.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            with contextlib.suppress(OSError):  # NFS
                fcntl.flock(locks[1], fcntl.LOCK_SH)
            self.path = self.path.rename(self.path.with_name(self.path.name[1:]))
        except BaseException:
            _close(locks)
            raise
        self._locks = locks

    def close(self) -> None:
        with contextlib.suppress(OSError):
            _remove(self.path)
        _close(self._locks)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def sweep_runs() -> list[str]:
    """Remove this user's directories of dead processes. Returns their names."""
    removed = []
    folder = Path(tempfile.gettempdir())
    for path in sorted([*folder.glob(f"{_PREFIX}*"), *folder.glob(f".{_PREFIX}*")]):
        with contextlib.suppress(OSError):  # not a run directory, another user's, or its owner is alive
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & OTHERS:
                continue
            if path.name.startswith(".") and not (path / _LOCK).exists():
                path.rmdir()
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
                removed.append(path.name)
            finally:
                os.close(lock)
    return removed


def _remove(path: Path) -> None:
    for item in path.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != _LOCK:
            item.unlink()
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}"))
    (path / _LOCK).unlink(missing_ok=True)
    path.rmdir()
