"""`nixl://`: engines of a cluster, over NIXL and UCX.

NIXL's progress thread is off: it burns a core, and hides how much it has received.

Memory of a CUDA device ("VRAM") needs a UCX built with CUDA; NIXL then starts anew on a thread that has the device's
context.

Fence: as in docs/transports.md; progress is made until everything left in sockets and queues is received.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import secrets
from typing import Any

import numpy as np

from baton.errors import ConfigError, ProtocolError, TransportError
from baton.transports.base import ByteArray, DeviceMemory, Direction
from baton.transports.batches import Runs
from baton.transports.remote.library import Library, RemotePeer
from baton.transports.remote.lifeline import Lifeline
from baton.transports.remote.remote_transport import HostOptions, RemoteTransport
from baton.transports.remote.tcp_buffers import held_bytes

_SEGMENT_BYTES = 8 << 10  # received from each socket in a round of progress
_MARGIN = 2  # segments may be shorter
_CLOSE_ROUNDS = 64
_TURN_ROUNDS = 16


class NixlOptions(HostOptions, frozen=True, kw_only=True):
    backend: str = "UCX"


class NixlLibrary(Library):
    scheme = "nixl"
    polls = True

    def __init__(self, options: NixlOptions) -> None:
        self._options = options
        self._agent: Any = None
        self._bounce: ByteArray
        self._device: int | None = None

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        self._bounce = bounce
        self._start_agent()

    def _start_agent(self) -> None:
        api = load_api()
        backend = self._options.backend
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[backend])
        self._agent = api.nixl_agent(f"baton-{secrets.token_hex(16)}", config)
        if backend not in self._agent.backends:
            raise ConfigError("transport", f"this build of NIXL has no backend {backend!r}")
        self._agent.register_memory([(self._bounce.ctypes.data, self._bounce.size, 0, "")], "DRAM")

    def stop(self) -> None:
        self._agent = None

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        self._agent.register_memory([(region.ctypes.data, region.size, 0, "") for region in regions], "DRAM")
        return self._agent.name, bytes(self._agent.get_agent_metadata())

    def register_device(self, memory: list[DeviceMemory]) -> tuple[str, bytes]:
        self._device = memory[0].device
        memory[0].enter()
        # A thread with the device's context must start UCX.
        self._start_agent()
        self._agent.register_memory([(part.address, part.nbytes, part.device, "") for part in memory], "VRAM")
        return self._agent.name, bytes(self._agent.get_agent_metadata())

    def add(self, endpoint: str, metadata: bytes) -> None:
        if endpoint == self._agent.name:
            return
        name = self._agent.add_remote_agent(metadata)
        if (name.decode() if isinstance(name, bytes) else name) != endpoint:
            self._agent.remove_remote_agent(name)
            raise ProtocolError("the metadata in the descriptor is another agent's")

    def remove(self, endpoint: str) -> bool:
        if endpoint != self._agent.name:
            # NIXL refuses if it has dropped the endpoint itself.
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(endpoint)
        for _ in range(_CLOSE_ROUNDS):
            self._agent.get_new_notifs()
        return True

    def issue(self, peer: RemotePeer, direction: Direction, rows: Runs) -> Any:
        descs = []
        own = None if rows[0, 0] == self._bounce.ctypes.data else self._device
        for side, device in enumerate((own, peer.device)):
            table = np.zeros((len(rows), 3), dtype=np.int64)
            table[:, 0], table[:, 1], table[:, 2] = rows[:, side], rows[:, 2], device or 0
            descs.append(self._agent.get_xfer_descs(table, "DRAM" if device is None else "VRAM"))
        handle = self._agent.initialize_xfer(direction.upper(), *descs, peer.endpoint)
        # A part may be in flight even if this fails: `check` finds the error.
        with contextlib.suppress(Exception):
            self._agent.transfer(handle)
        return handle

    def check(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransportError("a copy failed")
        if state == "DONE":
            handle.release()
        return bool(state == "DONE")

    def progress(self) -> None:
        for _ in range(_TURN_ROUNDS):
            self._agent.get_new_notifs()

    def receive_rest(self) -> None:
        for _ in range(_MARGIN * held_bytes() // _SEGMENT_BYTES):
            self._agent.get_new_notifs()


def load_api() -> Any:
    """Any of NIXL's packages. Raises `ConfigError`."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    # The wheel's own ibverbs library loads the system's RDMA drivers, and so the system's libnl beside the wheel's.
    # Unless the system's is loaded first, the process crashes at exit.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name not in (name, f"{name}._api"):
                raise ConfigError("transport", f"nixl does not load: {error}") from error
        except ImportError as error:
            raise ConfigError("transport", f"nixl does not load: {error}") from error
    raise ConfigError("transport", "nixl:// needs the package nixl-cu12: pip install 'baton-serve[nixl]'")


def create(options: NixlOptions) -> RemoteTransport:
    return RemoteTransport(NixlLibrary(options), options.host)
