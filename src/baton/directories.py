"""Directories and files that nobody else may put anything into: those of keys, and of stored KV.

Who can write to a key directory lets engines in; who can write to a store forges prefixes. So both are refused alike
when they are another user's, or open to others.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from baton.errors import ConfigError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO


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
