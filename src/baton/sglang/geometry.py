"""SGLang's KV buffers as regions and geometries, without a copy.

Each buffer of a layer (K, V, latents, a part of a state) is a region and a group. Page p is its bytes
[p * page_bytes, (p + 1) * page_bytes). Page 0 belongs to no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.handoff.plan.topology import RankGeometry
from baton.kv.geometry import NULL_PAGE, Geometry, Plane
from baton.kv.interval import Interval, Kind, Rules
from baton.kv.spec import ITEMSIZE, Cut, Owner
from baton.transports.base import Region

# SGLang reports the pages of these with a prompt's last chunk.
NAMED_LAST: tuple[Kind, ...] = ("sliding_window", "state")


@dataclass(frozen=True, slots=True)
class PagePart:
    """A tensor `[tokens of the page, num_heads, head_dim]` of a page; the parts of a page are contiguous. `first_head`:
    the model's index of this rank's first head, or channel."""

    name: str
    dtype: str
    cut: Cut
    num_heads: int
    head_dim: int
    first_head: int = 0

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.head_dim * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class KvBuffer:
    """`name` and `layer` identify it among the owner's buffers."""

    owner: Owner
    name: str
    layer: int
    address: int
    nbytes: int
    page_bytes: int
    parts: tuple[PagePart, ...]
    rules: Rules

    @property
    def group(self) -> str:
        return f"{self.owner}.{self.name}.{self.layer}"


def rules_of(owner: Owner, kind: Kind, window: int | None = None) -> Rules:
    """Entries of EAGLE and MTP heads also depend on the next token."""
    return Rules(kind, 0 if owner == "target" else 1, window)


@dataclass(frozen=True, slots=True)
class RequestPages:
    """`window`: the prompt's last pages."""

    all: Sequence[int]
    window: Sequence[int] = ()
    slots: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """`rules`: by group."""

    page_size: int
    regions: list[Region]
    geometries: dict[str, RankGeometry]
    rules: dict[str, Rules]

    def final(self, num_tokens: int, num_computed: int) -> dict[str, int]:
        """Per group with named pages, the final tokens of a prompt of `num_tokens` with `num_computed` computed. At the
        end the drafter has run with the first output token.
        """
        ended = num_computed == num_tokens
        return {
            name: rules.final(num_tokens, num_computed, seeded=ended)
            for name, rules in self.rules.items()
            if ended or rules.kind not in NAMED_LAST
        }

    def wanted(self, num_tokens: int, hit: int) -> dict[str, Interval]:
        """Per group, the entries of a prompt of `num_tokens` that D needs after a prefix hit of `hit` tokens. States
        always move: SGLang gives each request a new slot."""
        return {
            name: rules.wanted(num_tokens, 0 if rules.kind == "state" else hit) for name, rules in self.rules.items()
        }

    def below(self, wanted: dict[str, Interval], hit: int) -> bool:
        moved = [tokens for name, tokens in wanted.items() if self.rules[name].kind != "state"]
        return any(not tokens.empty and tokens.start < hit for tokens in moved)

    @property
    def shared(self) -> dict[str, str]:
        return {name: "full" if rules.kind == "mla" else rules.kind for name, rules in self.rules.items()}

    def tables(self, num_tokens: int, pages: RequestPages) -> dict[str, list[int]]:
        missing = -(-num_tokens // self.page_size) - len(pages.window)
        window = [NULL_PAGE] * missing + list(pages.window) if pages.window else []
        tables = {"full": list(pages.all), "sliding_window": window, "state": list(pages.slots)}
        return {name: tables[table] for name, table in self.shared.items()}


def describe_buffers(
    buffers: Sequence[KvBuffer],
    page_size: int,
    rank: int,
    region: Callable[[int, int], Region],
    turn: int | None = None,
) -> BufferLayout:
    """`region` makes one of an address and a number of bytes. `turn`: as in `RankGeometry`.

    Raises `ConfigError`.
    """
    layout = BufferLayout(page_size, [], {}, {})
    for buffer in buffers:
        tokens = 1 if buffer.rules.kind == "state" else page_size
        known = sum(part.token_bytes for part in buffer.parts)
        if buffer.page_bytes != known * tokens or buffer.nbytes % buffer.page_bytes:
            problem = f"{buffer.group}: {buffer.page_bytes} bytes are no page of {tokens} tokens of {known} bytes"
            raise ConfigError("kv_cache", problem)
        if buffer.group in layout.geometries:
            raise ConfigError("kv_cache", f"two buffers are {buffer.group}")
        geometry = _geometry(buffer, tokens, len(layout.regions)).check()
        layout.geometries[buffer.group] = RankGeometry(rank=rank, geometry=geometry, turn=turn)
        layout.rules[buffer.group] = buffer.rules
        layout.regions.append(region(buffer.address, buffer.nbytes))
    return layout


def _geometry(buffer: KvBuffer, page_size: int, region: int) -> Geometry:
    planes, base = [], 0
    for part in buffer.parts:
        element = ITEMSIZE[part.dtype]
        planes.append(
            Plane(
                name=part.name,
                dtype=part.dtype,
                cut=part.cut,
                num_heads=part.num_heads,
                head_dim=part.head_dim,
                layer_stride=buffer.nbytes,
                page_stride=buffer.page_bytes,
                token_stride=part.token_bytes,
                head_stride=part.head_dim * element,
                element_stride=element,
                first_head=part.first_head,
                base=base,
            )
        )
        base += page_size * part.token_bytes
    return Geometry(
        group=buffer.group,
        region=region,
        region_bytes=buffer.nbytes,
        num_pages=buffer.nbytes // buffer.page_bytes,
        page_size=page_size,
        layer_ids=(buffer.layer,),
        planes=tuple(planes),
    )
