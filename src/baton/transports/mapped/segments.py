"""The files of `shm://` in /dev/shm: needs no compiler and maps no memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.own_memory import own_mappings
from baton.transports.process import stat_of

SHM_DIR = "/dev/shm"
# Pid, start time of the process, and random digits.
SEGMENT_NAME = re.compile(r"baton-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}", re.ASCII)


def _runs(pid: int, start_time: str) -> bool:
    try:
        fields = stat_of(pid)
    except OSError:
        return True  # not proven dead
    return bool(fields) and fields[19] == start_time and fields[0] not in ("Z", "X")


def shm_status(directory: str = SHM_DIR) -> os.statvfs_result:
    """Raises `ConfigError`."""
    try:
        return os.statvfs(directory)
    except OSError as error:
        raise ConfigError("kv_transport", f"shm needs {directory}: {error.strerror}") from None


def remove_stale_segments(directory: str = SHM_DIR) -> list[str]:
    """Unlink this user's segments whose owner is dead. Returns their names.

    An owner is dead if no process with its pid and start time runs, and nobody holds the segment's lock. The lock
    covers owners in other namespaces; the pid covers the time between creating and locking a segment.
    """
    removed = []
    try:
        names = sorted(os.listdir(directory))
    except OSError:  # there is no shared memory here
        return []
    for name in names:
        match = SEGMENT_NAME.fullmatch(name)
        if match is None or _runs(int(match[1]), match[2]):
            continue
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):  # already removed, another user's, or locked by a living owner
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                    removed.append(name)
            finally:
                os.close(fd)
    return removed


def file_of(memory: npt.NDArray[np.uint8]) -> tuple[str, int]:
    """The file that contains `memory`, and the offset in it.

    Raises `ConfigError`.
    """
    address = memory.ctypes.data
    for mapping in own_mappings():
        if mapping.start <= address and address + memory.nbytes <= mapping.stop:
            path = Path(mapping.file)
            if str(path.parent) == SHM_DIR and SEGMENT_NAME.fullmatch(path.name):
                return str(path), mapping.offset + address - mapping.start
    raise ConfigError(
        "kv_transport", "must be shm with several tensor ranks: they are processes that share their pages"
    )
