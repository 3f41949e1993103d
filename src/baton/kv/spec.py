"""The KV cache spec of a group of layers: planes, page size, and retention rules. `Geometry` has the memory layout."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.errors import ProtocolError
from baton.kv.interval import Kind, Rules

Owner = Literal["target", "draft"]
Cut = Literal["heads", "channels", "whole"]

MAX_PLANES = 16
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


class PlaneSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer's part per token, or per state slot: `num_heads` x `head_dim` elements on this rank. `cut`: as in
    `Plane`.
    """

    name: str
    dtype: str
    num_heads: int
    head_dim: int
    cut: Cut = "heads"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.itemsize


Planes = tuple[PlaneSpec, ...]


def kv_planes(num_kv_heads: int, head_dim: int, dtype: str) -> Planes:
    """Planes of ordinary attention. `num_kv_heads` counts this rank's."""
    return PlaneSpec("k", dtype, num_kv_heads, head_dim), PlaneSpec("v", dtype, num_kv_heads, head_dim)


# The keys that sparse attention chooses tokens by.
INDEX_PLANE = "index"


def latent_planes(latent_dim: int, rope_dim: int, dtype: str, index_dim: int = 0) -> Planes:
    """MLA's latent and rope key side by side, and the index key if any."""
    latent = PlaneSpec("latent", dtype, 1, latent_dim + rope_dim, "whole")
    return (latent, PlaneSpec(INDEX_PLANE, dtype, 1, index_dim, "whole")) if index_dim else (latent,)


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers on one rank that share a block table.

    `page_size` and `window` are in tokens. A `state` group's page is one state slot, and its `page_size` is 1.
    `layer_ids`: layer numbers of the model. `module`: see `interval`; only the target's groups have 0.

    Raises `ProtocolError` for inconsistent values.
    """

    name: str
    owner: Owner
    kind: Kind
    planes: Planes
    page_size: int
    layer_ids: tuple[int, ...]
    window: int | None = None
    module: int | None = 0
    rate: int = 1

    def __post_init__(self) -> None:
        names = {plane.name for plane in self.planes}
        counts = [n for plane in self.planes for n in (plane.num_heads, plane.head_dim)]
        if min(counts, default=0) < 1 or min(self.page_size, self.num_layers) < 1:
            raise ProtocolError(f"group {self.name!r}: every count must be at least 1")
        if len(self.planes) > MAX_PLANES or len(names) != len(self.planes):
            raise ProtocolError(f"group {self.name!r}: there must be 1 to {MAX_PLANES} planes of different names")
        for plane in self.planes:
            if plane.dtype not in ITEMSIZE:
                raise ProtocolError(f"group {self.name!r}: unknown dtype {plane.dtype!r}")
        if len(set(self.layer_ids)) != self.num_layers:
            raise ProtocolError(f"group {self.name!r}: layer_ids must differ")
        if (self.module == 0) != (self.owner == "target"):
            raise ProtocolError(f"group {self.name!r}: module 0 is the target, not module {self.module!r}")
        try:
            rules = self.rules
        except ProtocolError as error:
            raise ProtocolError(f"group {self.name!r}: {error}") from None
        if self.kind == "state" and self.page_size != 1:
            raise ProtocolError(f"group {self.name!r}: a state slot has no token axis, its page_size is 1")
        if self.page_size % rules.rate:
            raise ProtocolError(f"group {self.name!r}: pages of {self.page_size} tokens cut entries of {rules.rate}")

    @property
    def rules(self) -> Rules:
        return Rules(self.kind, self.module, self.window, self.rate)

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane within one layer of a dense page, then the layer's bytes.

        Multiples of the widest element's size, so that each plane can be viewed as its dtype.
        """
        align = max(plane.itemsize for plane in self.planes)
        offsets = [0]
        for plane in self.planes:
            offsets.append(-(-(offsets[-1] + plane.token_bytes * self.page_size) // align) * align)
        return tuple(offsets)

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.plane_offsets[-1]
