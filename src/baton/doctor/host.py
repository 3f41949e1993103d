"""This host's limits, and what servers here need."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from baton.doctor.checkup import Checkup, Finding, Host, Server

_SHM, _RDMA = Path("/dev/shm"), Path("/sys/class/infiniband")
_MiB = 2**20
# What containers get by default, too little for KV or for vLLM's message queues.
_DEFAULT_SHM = 64 * _MiB
_LEAST_FREE_SHM = 16 * _MiB
# The client's connection and two legs; besides files, pipes and engines' sockets.
_FILES_PER_REQUEST, _OTHER_FILES = 3, 256
_LEAST_FILES = 1024


def read_host() -> Host:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size, free = None, 0
    if _SHM.is_dir():
        stats = os.statvfs(_SHM)
        size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Host(
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        num_files=2**31 if files == resource.RLIM_INFINITY else files,
        shm_bytes=size,
        shm_free=free,
        rdma=_rdma_devices(),
    )


def _rdma_devices() -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(_RDMA)))
    except OSError:
        return ()


def check_host(checkup: Checkup) -> Iterator[Finding]:
    """Pure."""
    host = checkup.host
    local = [server for server in checkup.servers if server.problem is None and server.is_here()]
    if host is None or not (local or (checkup.router is not None and checkup.router.is_here)):
        return
    if host.rdma and host.memlock is not None and any(_registers(server) for server in local):
        yield Finding(
            "memlock",
            "this host",
            "ulimit -l",
            f"{host.memlock // 1024} KiB",
            f"where {', '.join(host.rdma)} must pin the KV cache",
            "start the servers with ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1)",
        )
    if local and host.shm_bytes is not None:
        yield from _shm(host.shm_bytes, host.shm_free)
    needed = _files(local)
    if host.num_files < needed:
        yield Finding(
            "nofile",
            "this host",
            "ulimit -n",
            str(host.num_files),
            f"where {needed} are needed",
            "start router and servers with a higher ulimit -n (LimitNOFILE), or with a smaller --max-num-seqs",
        )


def _shm(size: int, free: int) -> Iterator[Finding]:
    cure = "enlarge it (--shm-size of a container, an emptyDir of medium Memory), or remove what is left in it"
    if size <= _DEFAULT_SHM:
        what = "all that containers have by default, where engines keep KV and message queues in it"
        yield Finding("shm", "this host", "the size of /dev/shm", f"{size // _MiB} MiB", what, cure)
    elif free < _LEAST_FREE_SHM:
        what = f"of {size // _MiB} MiB"
        yield Finding("shm", "this host", "the free space of /dev/shm", f"{free // _MiB} MiB", what, cure)


def _registers(server: Server) -> bool:
    if server.kind == "baton":
        return server.settings.get("kv_transport", "").partition(" ")[0] in ("nixl", "mooncake")
    return server.connector is not None


def _files(here: list[Server]) -> int:
    limits = [server.max_num_seqs for server in here if "decode" in server.roles]
    return max(_LEAST_FILES, _FILES_PER_REQUEST * sum(limits) + _OTHER_FILES)
