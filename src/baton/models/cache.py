"""What a layer keeps between steps, and the one door through which it reaches that.

Shapes: T rows of a forward, R requests, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """What one attention layer keeps per token.

    `window`: key j is visible to query i iff i - window < j <= i; None: full attention.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class LatentLayerSpec:
    """What one layer of multi-head latent attention (DeepSeek-V2, 2024) keeps per token, for all its heads."""

    latent_dim: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class StatePlane:
    """One part of a layer's state: `num_heads` x `head_dim`. `cut`: what ranks share it by; `dtype` None: the
    model's."""

    name: str
    num_heads: int
    head_dim: int
    cut: Literal["heads", "channels", "whole"] = "heads"
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """What one recurrent layer keeps per request."""

    planes: tuple[StatePlane, ...]


LayerSpec = KVLayerSpec | LatentLayerSpec | StateLayerSpec

States = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Scanned:
    """The rows that a recurrence goes over: those of request r are query_start[r] .. query_start[r + 1] (int32
    [R + 1]). The states behind the rows `kept` (int64 [K], ascending) are wanted."""

    query_start: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int64]


class Recurrence(Protocol):
    """A recurrent layer's arithmetic, of its inputs alone: it keeps nothing."""

    def __call__(self, states: States, rows: Scanned) -> tuple[Tensor, States]:
        """From each plane's states before the rows [R, num_heads, head_dim], zeros where a request begins: the layer's
        output [T, ...], and each plane's states behind the rows `kept` [K, num_heads, head_dim]."""
        ...


class Attend(Protocol):
    """Given by the runner for one forward: writes k and v to the paged cache, then attends causally.

    q [T, H, D], k and v [T, G, D] (G key-value heads), `scale` on the dot products; returns [T, H, D]. `sinks`
    float32 [H]: one more logit of each head in every row's softmax, with no key and no value behind it.
    """

    def __call__(
        self,
        layer_id: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor: ...


class LatentHeads(Protocol):
    """What a layer's heads make of latents, in two forms with one meaning (DeepSeek-V2, arXiv:2405.04434, 2.1).

    Expanded: keys [S, H, D] and values [S, H, V] of S kept rows [S, C + R]. Absorbed: queries [T, H, D] become queries
    [T, H, C + R] of the kept rows themselves, and sums of latents [T, H, C] become sums of values [T, H, V].
    `always_absorbed`: the forms round differently, so rows that may not depend on their batch take one alone.
    """

    value_dim: int
    always_absorbed: bool

    def expand(self, kept_SW: Tensor) -> tuple[Tensor, Tensor]: ...
    def absorb(self, q_THD: Tensor) -> Tensor: ...
    def values(self, latent_THC: Tensor) -> Tensor: ...


class LayerCache(Attend, Protocol):
    """The cache of one forward's rows: what is called for keys and values, with a door for each other kind."""

    def attend_latent(
        self,
        layer_id: int,
        q_THD: Tensor,
        latent_TC: Tensor,
        rope_TR: Tensor,
        scale: float,
        heads: LatentHeads | None = None,
    ) -> Tensor:
        """Write the rows' latents and rope keys (one for all heads), then attend causally.

        q is [T, H, D]; returns [T, H, V], by whichever form costs less for a request's rows. Without `heads` every head
        reads what is kept: q is [T, H, C + R], against latent and rope key side by side, and every value is the latent;
        returns [T, H, C].
        """
        ...

    def scan(self, layer_id: int, recurrence: Recurrence) -> Tensor:
        """Go on from each request's state; returns the recurrence's output. What it says of kept rows is written."""
        ...
