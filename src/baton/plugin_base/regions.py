"""An engine's own memory as regions of a transport, without a copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from baton.transports.base import DeviceMemory, Region


def host_region(address: int, nbytes: int) -> Region:
    """The caller keeps the memory allocated while the region is used."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def cuda_region(address: int, nbytes: int, device: int) -> Region:
    return DeviceMemory(address, nbytes, device, lambda: torch.cuda.set_device(device))
