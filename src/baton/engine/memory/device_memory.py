"""Pages on a CUDA device, for transports and digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol.digests import MemoryDigester, TokenReader
from baton.kv.geometry import Geometry, Plane
from baton.transports.base import DeviceMemory, Region

# Digests read bits, so any dtype of the right size works.
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def device_region(pages: Tensor) -> DeviceMemory:
    """A group's pages, uint8 [num_pages, page_bytes] on a CUDA device, as a transport registers them."""
    device = pages.device
    return DeviceMemory(pages.data_ptr(), pages.nbytes, device.index or 0, lambda: torch.cuda.set_device(device))


def make_digester(geometries: Mapping[str, RankGeometry], regions: Sequence[Region]) -> MemoryDigester:
    """Reads pages in place. Raises as `MemoryDigester`."""
    devices = {region.device for region in regions if isinstance(region, DeviceMemory)}
    if not devices:
        return MemoryDigester(geometries, regions)
    # Digests have a stream of their own, so they need not wait for the engine's next step.
    stream = torch.cuda.Stream(torch.device("cuda", devices.pop()))  # type: ignore[no-untyped-call]
    return MemoryDigester(geometries, regions, lambda *plane: _device_plane(stream, *plane))


class _Bytes:
    def __init__(self, region: DeviceMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _device_plane(stream: Any, geometry: Geometry, plane: Plane, region: DeviceMemory) -> TokenReader:
    size, device = plane.itemsize, torch.device("cuda", region.device)
    numbers = torch.as_tensor(_Bytes(region), device=device).view(_OF_SIZE[size])
    view = numbers.as_strided(
        (geometry.num_layers, geometry.num_pages, geometry.page_size, plane.num_heads, plane.head_dim),
        [
            stride // size
            for stride in (
                plane.layer_stride,
                plane.page_stride,
                plane.token_stride,
                plane.head_stride,
                plane.element_stride,
            )
        ],
        plane.base // size,
    )

    def gather(layer: int, pages: NDArray[np.int64], heads: slice) -> memoryview:
        with torch.cuda.stream(stream):
            gathered = view[layer][torch.from_numpy(pages).to(device)][:, :, heads]
            return gathered.contiguous().cpu().view(-1).numpy().view(np.uint8).data

    return gather
