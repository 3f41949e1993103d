"""The far side of a transport under test, in this process or in its own.

The process that owns the memory sees the effect of a copy. A separate process (`serve_peer`) answers each JSON line of
stdin with one line.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.children import PYTHON, LineProcess
from baton.testing.transport_memory import allocate, register
from baton.transports.base import ByteArray, Transport
from baton.transports.registry import create_transport


def pattern(nbytes: int, seed: int) -> ByteArray:
    """Deterministic `[nbytes]` uint8 that differ between seeds and between offsets."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class FarSide(ABC):
    """A transport with registered regions of zeros, and its `descriptor` for `connect`."""

    descriptor: bytes

    @abstractmethod
    def fill(self, region: int, seed: int) -> None:
        """Overwrite a region with `pattern(size, seed)`."""

    @abstractmethod
    def read(self, region: int) -> ByteArray:
        """A copy of a region as its owner sees it."""

    @abstractmethod
    def close(self) -> None:
        """Close its transport cleanly. Idempotent."""

    def kill(self) -> bool:
        """False if it shares this process."""
        return False

    def stop(self) -> bool:
        """Halt it until `go_on`; False if it shares this process."""
        return False

    def go_on(self) -> None:  # noqa: B027
        ...


class NearbyPeer(FarSide):
    def __init__(self, transport: Transport, sizes: Sequence[int], device: str | None = None) -> None:
        self._transport = transport
        self._regions = [allocate(transport, f"region {i}", size, device) for i, size in enumerate(sizes)]
        self.descriptor = register(transport, self._regions)

    def fill(self, region: int, seed: int) -> None:
        self._regions[region][:] = pattern(self._regions[region].size, seed)

    def read(self, region: int) -> ByteArray:
        whole: ByteArray = self._regions[region].copy()
        return whole

    def close(self) -> None:
        self._transport.close()


class SpawnedPeer(FarSide):
    """A far side in a process of its own, which runs `serve_peer`."""

    def __init__(self, uri: str, sizes: Sequence[int], device: str | None = None) -> None:
        command = [*PYTHON, "-c", f"from {__name__} import serve_peer; serve_peer({uri!r}, {device!r})"]
        self._child = LineProcess(command, {**os.environ, "OMP_NUM_THREADS": "1"})
        self._process = self._child.process
        self.descriptor = base64.b64decode(self._ask({"do": "open", "sizes": list(sizes)}))

    def _ask(self, request: dict[str, Any]) -> str:
        self._child.write_line(json.dumps(request))
        answer = self._child.read_line()
        if not answer:
            raise AssertionError(f"the peer process died at {request['do']!r}")
        return answer

    def fill(self, region: int, seed: int) -> None:
        self._ask({"do": "fill", "region": region, "seed": seed})

    def read(self, region: int) -> ByteArray:
        return np.frombuffer(base64.b64decode(self._ask({"do": "read", "region": region})), dtype=np.uint8)

    def close(self) -> None:
        """The process lives until its transport is closed."""
        if self._process.poll() is None:
            self._ask({"do": "close"})
        self._child.close()

    def kill(self) -> bool:
        self._process.kill()
        self._child.close()
        return True

    def stop(self) -> bool:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        return True

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


def serve_peer(uri: str, device: str | None = None) -> None:
    transport = create_transport(uri)
    peer: NearbyPeer | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            answer = "ok"
            if request["do"] == "open":
                peer = NearbyPeer(transport, request["sizes"], device)
                answer = base64.b64encode(peer.descriptor).decode()
            elif request["do"] == "close":
                transport.close()
            elif peer is not None and request["do"] == "fill":
                peer.fill(request["region"], request["seed"])
            elif peer is not None and request["do"] == "read":
                answer = base64.b64encode(peer.read(request["region"]).tobytes()).decode()
            print(answer, flush=True)
    finally:
        transport.close()
