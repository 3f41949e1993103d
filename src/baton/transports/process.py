"""A peer's process, and whether it is dead, which is only known on the same host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import select
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.errors import ProtocolError


class Contact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A lifeline's address, secret and process. Processes that share namespaces (pids, time) have equal `host_key`s."""

    host: str
    port: int
    secret: bytes
    pid: int
    start_time: str
    host_key: str


def check_contact(contact: Contact) -> None:
    """Raises `ProtocolError`."""
    if not (0 < contact.port < 1 << 16 and 0 < contact.pid < 1 << 31 and len(contact.secret) == 16):
        raise ProtocolError("the contact in the descriptor is out of range")
    try:
        ipaddress.ip_address(contact.host)  # a name would need a lookup of unbounded duration
    except ValueError as error:
        raise ProtocolError(f"the host in the descriptor is no numeric address: {contact.host[:64]!r}") from error


class ProcessWatch:
    """Sees a process with the same `own_host_key` die, never another."""

    def __init__(self, pid: int, start_time: str, host_key: str) -> None:
        self._owner = pid, start_time
        self._same_host = host_key == own_host_key()
        self._release: Callable[[], object] | None = None
        self._fd = -1
        if self._same_host:
            with contextlib.suppress(OSError):
                self._fd = os.pidfd_open(pid)
                self._release = weakref.finalize(self, os.close, self._fd)
        # No such process, or its pid belongs to another.
        self._gone = self._has_gone()

    def _has_gone(self) -> bool:
        pid, start_time = self._owner
        try:
            return self._same_host and process_start_ticks(pid) != start_time
        except OSError:
            return False  # unknown, for example if no file descriptor is left

    def dead(self) -> bool:
        """Every thread of the process is gone, and so its memory."""
        if not self._gone and self._release is not None:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            self._gone = bool(poller.poll(0))
        elif not self._gone:
            self._gone = self._has_gone()
        return self._gone

    def release(self) -> None:
        """Afterwards `dead` sees a death only once the process has been reaped. Idempotent."""
        self.dead()
        release, self._release = self._release, None
        if release is not None:
            release()


def own_host_key() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        pids, times = Path("/proc/self/ns/pid"), Path("/proc/self/ns/time")
        # Start times differ between namespaces.
        return f"{boot} {pids.stat().st_ino} {times.stat().st_ino if times.exists() else 0}"
    except OSError:
        return secrets.token_hex(16)  # unique


def process_start_ticks(pid: int) -> str:
    """Clock ticks from boot to the start of a process; "" if none. Raises `OSError` as `stat_of` does."""
    fields = stat_of(pid)
    return fields[19] if fields else ""


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; empty for an unknown process.

    Raises `OSError` if unknown, as without a free file descriptor.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The command in brackets may contain anything.
    return text.rpartition(")")[2].split()
