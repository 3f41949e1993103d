"""Describes SGLang's KV buffers as regions and geometries, without a copy.

SGLang keeps one buffer `[slots, heads, elements]` per layer for K, one for V, or one for MLA's latents. Page p holds
the slots [p * page_size, (p + 1) * page_size). All layers share a request's pages; page 0 belongs to no request. Each
buffer is an allocation, so a region and a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.errors import ConfigError
from baton.handoff.plan.topology import RankGeometry
from baton.kv.geometry import Geometry, Plane
from baton.kv.interval import Interval, Rules
from baton.kv.spec import ITEMSIZE, Owner
from baton.transports.base import Region

BufferPart = Literal["k", "v", "latent"]


@dataclass(frozen=True, slots=True)
class KvBuffer:
    """One buffer at `address`, of `page_bytes` per page. `layer`: the number in its model. `first_head`: the model's
    number of this rank's first head; latents have one head, whole on every rank."""

    owner: Owner
    part: BufferPart
    layer: int
    address: int
    nbytes: int
    page_bytes: int
    dtype: str
    num_heads: int
    head_dim: int
    first_head: int = 0

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.part}.{self.layer}"

    @property
    def rules(self) -> Rules:
        # An entry of EAGLE and MTP heads depends on the next token too.
        return Rules("mla" if self.part == "latent" else "full", 0 if self.owner == "target" else 1)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The KV cache of one rank. `rules`: by group."""

    page_size: int
    regions: list[Region]
    geometries: dict[str, RankGeometry]
    rules: dict[str, Rules]

    def final(self, num_tokens: int, num_computed: int) -> dict[str, int]:
        """Per group, the final tokens of a prompt of `num_tokens` of which `num_computed` are computed. At the end the
        drafter has run with the first output token."""
        ended = num_computed == num_tokens
        return {name: rules.final(num_tokens, num_computed, seeded=ended) for name, rules in self.rules.items()}

    def wanted(self, num_tokens: int, hit: int) -> dict[str, Interval]:
        """Per group, the entries of a prompt of `num_tokens` that D needs after a prefix hit of `hit` tokens."""
        return {name: rules.wanted(num_tokens, hit) for name, rules in self.rules.items()}

    def tables(self, pages: Sequence[int]) -> dict[str, list[int]]:
        table = list(pages)
        return dict.fromkeys(self.rules, table)


def describe_buffers(
    buffers: Sequence[KvBuffer], page_size: int, rank: int, region: Callable[[int, int], Region]
) -> BufferLayout:
    """`region` makes one of an address and a number of bytes.

    Raises `ConfigError` for a buffer that is not whole pages of whole tokens.
    """
    layout = BufferLayout(page_size, [], {}, {})
    for buffer in buffers:
        token_bytes = buffer.num_heads * buffer.head_dim * ITEMSIZE[buffer.dtype]
        if buffer.page_bytes != token_bytes * page_size or buffer.nbytes % buffer.page_bytes:
            raise ConfigError("kv_cache", f"{buffer.name}: {buffer.page_bytes} bytes are no page of {page_size} tokens")
        if buffer.name in layout.geometries:
            raise ConfigError("kv_cache", f"two buffers are {buffer.name}")
        geometry = _geometry(buffer, page_size, len(layout.regions)).check()
        layout.geometries[buffer.name] = RankGeometry(rank=rank, geometry=geometry)
        layout.rules[buffer.name] = buffer.rules
        layout.regions.append(region(buffer.address, buffer.nbytes))
    return layout


def _geometry(buffer: KvBuffer, page_size: int, region: int) -> Geometry:
    element = ITEMSIZE[buffer.dtype]
    plane = Plane(
        name=buffer.part,
        dtype=buffer.dtype,
        cut="whole" if buffer.part == "latent" else "heads",
        num_heads=buffer.num_heads,
        head_dim=buffer.head_dim,
        layer_stride=buffer.nbytes,
        page_stride=buffer.page_bytes,
        token_stride=buffer.page_bytes // page_size,
        head_stride=buffer.head_dim * element,
        element_stride=element,
        first_head=buffer.first_head,
    )
    return Geometry(
        group=buffer.name,
        region=region,
        region_bytes=buffer.nbytes,
        num_pages=buffer.nbytes // buffer.page_bytes,
        page_size=page_size,
        layer_ids=(buffer.layer,),
        planes=(plane,),
    )
