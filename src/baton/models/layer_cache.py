"""What each kind of layer keeps between steps, and `LayerCache`, a layer's only access to it.

Shapes: T rows of a forward, R requests, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.errors import BatonError


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """`window`: query i sees key j iff i - window < j <= i; None: all j <= i. `lookback`: how many keys before its
    window a query's position must have, for a drafter that reads this layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    lookback: int = 0


@dataclass(frozen=True, slots=True)
class LatentLayerSpec:
    """One layer of latent attention (DeepSeek-V2, 2024): one latent and one rope key per token, for all heads.
    `index_dim`: size of sparse attention's index keys, 0 without.
    """

    latent_dim: int
    rope_dim: int
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class StatePlane:
    """One part of a layer's state: `num_heads` x `head_dim`. `cut`: how tensor ranks share it ("whole": each has all).
    `dtype` None: the model's."""

    name: str
    num_heads: int
    head_dim: int
    cut: Literal["heads", "channels", "whole"] = "heads"
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """A recurrent layer: one state per request, of several parts."""

    planes: tuple[StatePlane, ...]


@dataclass(frozen=True, slots=True)
class SharedLayerSpec:
    """A layer without KV: it attends to the keys and values of the earlier layer `source`."""

    source: int


@dataclass(frozen=True, slots=True)
class EmptyLayerSpec:
    """A layer without KV, such as an MLP."""


# Planes of a layer with compressed entries: a token's row, the inputs of entries, an entry, an entry's index key.
TOKEN, OPEN, ENTRY, INDEX = "token", "open", "entry", "index"


@dataclass(frozen=True, slots=True)
class TokenPart:
    """A part of a layer's cache: the sizes of its planes, kept for each of the last `window` tokens (None: all), or for
    each `rate` tokens: an entry that exists once its last token does. The same on all tensor ranks.
    """

    planes: tuple[tuple[str, int], ...]
    window: int | None = None
    rate: int = 1


@dataclass(frozen=True, slots=True)
class PartsLayerSpec:
    """Each part has its own group."""

    parts: tuple[TokenPart, ...]


LayerSpec = KVLayerSpec | LatentLayerSpec | StateLayerSpec | SharedLayerSpec | EmptyLayerSpec | PartsLayerSpec

States = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ScanRows:
    """The rows of a recurrence: those of request r are query_start[r] .. query_start[r + 1] (int32 [R + 1]). `kept`:
    the rows after which states are returned (int64 [K], ascending)."""

    query_start: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int64]


class Recurrence(Protocol):
    """A layer's scan: a pure function."""

    def __call__(self, states: States, rows: ScanRows) -> tuple[Tensor, States]:
        """`states`: each plane's before the rows [R, num_heads, head_dim], zeros for a new request. Returns the layer's
        output [T, ...], and the states after the rows `kept` [K, num_heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class AttnRows:
    """Rows for attention: q [T, H, D], k and v [T, G, D] (None: nothing is written), `scale` on the dot products.
    `sinks_H` float32: one more logit per head in every row's softmax, without key or value."""

    q_THD: Tensor
    k_TGD: Tensor | None
    v_TGD: Tensor | None
    scale: float
    sinks_H: Tensor | None = None


class Attend(Protocol):
    """Write k and v to the paged cache, then attend causally, for one forward. Returns [T, H, D]."""

    def __call__(self, layer_id: int, rows: AttnRows) -> Tensor: ...


class LatentHeads(Protocol):
    """A layer's projections between latents and heads, in two equivalent forms (DeepSeek-V2, arXiv:2405.04434, 2.1).

    Expanded: S kept rows [S, C + R] become keys [S, H, D] and values [S, H, V]. Absorbed: queries [T, H, D] become
    queries [T, H, C + R] against the kept rows, and sums of latents [T, H, C] become sums of values [T, H, V].
    `always_absorbed`: batch-invariant rows always use this form, since the two round differently.
    """

    value_dim: int
    always_absorbed: bool

    def expand(self, kept_SW: Tensor) -> tuple[Tensor, Tensor]: ...
    def absorb(self, q_THD: Tensor) -> Tensor: ...
    def values(self, latent_THC: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The rows of an indexer (DeepSeek-V3.2, 2025): q [T, H, D], k [T, D] and `weights` float32 [T, H]. Key s has the
    score sum over heads of weight relu(q k_s), and a row attends to the `top_k` visible keys with the best scores.
    `k_TD` None: the keys are kept already."""

    q_THD: Tensor
    k_TD: Tensor | None
    weights_TH: Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The keys that an indexer chose: `positions` int64 [N, top_k], ascending, for the rows `rows` int64 [N]. Other
    rows see at most `top_k` keys: all."""

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Rows for latent attention: q [T, H, D], latents [T, C] and rope keys [T, R], one for all heads.

    Computed in the form of `heads` that costs less for a request's rows. Without `heads` a key is latent and rope key
    side by side and a value is the latent, so D is C + R and V is C. The rows of `chosen` attend to its keys only.
    """

    q_THD: Tensor
    latent_TC: Tensor
    rope_TR: Tensor
    scale: float
    heads: LatentHeads | None = None
    chosen: Chosen | None = None


@dataclass(frozen=True, slots=True)
class KVRegion:
    """A group's keys and values [pages, layers, 2, page_size, G, D], and the rows' page table int32 [R, columns]."""

    kv: Tensor
    page_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KVRegions:
    """Keys and values for a kernel that runs several layers in one call; slots are not checked. `layers` [layers, 3]:
    each layer's region, its index in it, and its window (0: none). `wrote`: called with written layers
    and how many rows they have, for the last rows with the last layer alone."""

    query_start: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    regions: tuple[KVRegion, ...]
    layers: npt.NDArray[np.int64]
    wrote: Callable[[range, int], None] | None = None

    def block(self, start: int, stop: int) -> KVRegions:
        """The regions for rows start..stop only."""
        first = int(np.searchsorted(self.query_start, start, "right")) - 1
        last = int(np.searchsorted(self.query_start, stop))
        query_start = np.clip(self.query_start[first : last + 1], start, stop) - start
        regions = tuple(KVRegion(region.kv, region.page_table[first:last]) for region in self.regions)
        return KVRegions(query_start, self.positions[start:stop], regions, self.layers)


@runtime_checkable
class InPlaceCache(Protocol):
    """A cache in host memory, which kernels may read and write themselves."""

    def regions(self) -> KVRegions | None:
        """None if layers must be called one by one."""
        ...


def slot_error() -> BatonError:
    return BatonError("attention: a row's slot is in the null page or outside its page table")


class Compress(Protocol):
    """A pure function."""

    def __call__(self, windows: Sequence[Tensor], numbers_N: Tensor) -> Mapping[str, Tensor]:
        """`windows`: for each of N entries, the open plane's rows [S, O] of its tokens and those that it overlaps.
        `numbers_N`: the entries' numbers (int64). Returns the numbers [N, W] of each plane of entries."""
        ...


@dataclass(frozen=True, slots=True)
class Compressed:
    """The compressed part of a layer (DeepSeek-V4, 2026): an entry for each `rate` tokens, made by `compress` from the
    open plane's rows `open_TO` of these tokens and of the `overlap` before them. With `index` a row attends to the best
    entries only, else to all complete ones.
    """

    rate: int
    overlap: int
    open_TO: Tensor
    compress: Compress
    index: IndexRows | None


@dataclass(frozen=True, slots=True)
class WindowRows:
    """A layer's rows for attention to one key per token that is also its value: q [T, H, D], kept [T, D]. The row at
    position i sees the tokens j with i - window < j <= i, and the entries of `compressed`. `sinks_H`: as `AttnRows`.
    """

    q_THD: Tensor
    kept_TD: Tensor
    scale: float
    window: int
    sinks_H: Tensor
    compressed: Compressed | None = None


class LayerCache(Attend, Protocol):
    """The cache for one forward's rows. `chosen`: by the last layer with an indexer in this forward."""

    chosen: Chosen | None

    def write(self, layer_id: int, k_TGD: Tensor, v_TGD: Tensor) -> None: ...

    def write_latent(self, layer_id: int, latent_TC: Tensor, rope_TR: Tensor) -> None: ...

    def attend_kept(self, layer_id: int, q_THD: Tensor, scale: float, window: int | None) -> Tensor:
        """Attend without writing: for layers without own KV. `window`: as `KVLayerSpec`."""
        ...

    def choose(self, layer_id: int, rows: IndexRows) -> None:
        """Write the rows' index keys, then set `chosen`. Precedes the same layer's `attend_latent`."""
        ...

    def attend_latent(self, layer_id: int, rows: LatentRows) -> Tensor:
        """Write the rows' latents and rope keys, then attend causally. Returns [T, H, V]."""
        ...

    def attend_window(self, layer_id: int, rows: WindowRows) -> Tensor:
        """Write the rows and the entries that they complete, then attend. Returns [T, H, D]."""
        ...

    def scan(self, layer_id: int, recurrence: Recurrence) -> Tensor:
        """Return the output of `recurrence`, and write the states."""
        ...
