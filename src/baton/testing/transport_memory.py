"""Memory for the transport suite: host memory, as the transport allocates it, or memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.transports.base import ByteArray, DeviceMemory, Transport


class OnDevice:
    """Bytes of a CUDA device, with as much array behaviour as the suite needs. Each use waits for the device."""

    def __init__(self, nbytes: int, device: str) -> None:
        import torch

        self._torch = torch
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(self._bytes.device)

    @property
    def size(self) -> int:
        return int(self._bytes.numel())

    @property
    def region(self) -> DeviceMemory:
        device = self._bytes.device
        return DeviceMemory(
            self._bytes.data_ptr(), self.size, device.index or 0, lambda: self._torch.cuda.set_device(device)
        )

    def __setitem__(self, key: slice, values: ByteArray | int) -> None:
        filled = np.full(self.size, values, dtype=np.uint8) if isinstance(values, int) else values.copy()
        self._bytes[key] = self._torch.from_numpy(filled).to(self._bytes.device)
        self._torch.cuda.synchronize(self._bytes.device)

    def __array__(self, *_: Any, **__: Any) -> ByteArray:
        return self.copy()

    def __eq__(self, other: object) -> Any:
        return self.copy() == other

    __hash__ = None  # type: ignore[assignment]

    def any(self) -> bool:
        return bool(self.copy().any())

    def copy(self) -> ByteArray:
        content: ByteArray = self._bytes.cpu().numpy()
        return content


RegisteredMemory = ByteArray | OnDevice


def allocate(transport: Transport, name: str, nbytes: int, device: str | None) -> Any:
    """Zeroed memory for a region of `transport`: its own, or that of `device`."""
    return transport.allocate(name, nbytes) if device is None else OnDevice(nbytes, device)


def register(transport: Transport, memory: Sequence[RegisteredMemory]) -> bytes:
    return transport.register([part.region if isinstance(part, OnDevice) else part for part in memory])
