"""The interface between the engine and a drafter, which proposes the tokens that the target may choose next.

A drafter gets data, access to its own KV (`Pages`), and the sampling noise (`Choose`). It never sees the runner,
requests or pools. Shapes: R requests, T rows of all requests concatenated, F features per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.drafters.chain import IntArray, ModuleChain
from baton.models.layer_cache import LayerCache, LayerSpec

FloatArray = npt.NDArray[np.float64]


class Pages(Protocol):
    """The KV and states that the drafter keeps for a batch's requests."""

    def bind(self, requests: IntArray, positions: IntArray, query_start: npt.NDArray[np.int32]) -> LayerCache:
        """The cache for one forward over rows of some of the batch's requests.

        `positions` int64 [T]. The rows of `requests[i]` are query_start[i] .. query_start[i + 1], int32 [R + 1].
        States are found by position: a request's rows continue from the state that the previous batch left, and each
        further draft from the state of the position before it.
        """
        ...


class Choose(Protocol):
    """Chooses draft tokens as the target does: with the sampling noise of each request's position."""

    def __call__(self, logits_RV: Tensor, requests: IntArray, step: int, target_ids: Tensor | None) -> IntArray:
        """Target ids int64 [R] of draft `step` (from 0) for `requests`, indices into the batch.

        `logits_RV` [R, draft_vocab]. `target_ids` int64 [draft_vocab] maps draft ids to target ids, None if they are
        the same.
        """
        ...


class DraftNoise(Protocol):
    """The sampling noise for drafters that choose their tokens themselves."""

    def __call__(self, requests: IntArray, step: int) -> tuple[FloatArray, Sequence[FloatArray | None]] | None:
        """Temperatures [R] and noise by target id of draft `step`; None for greedy requests, or if all are."""
        ...


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """New rows whose next token is known; drafts are proposed after each request's last row.

    Row i of a request has the target's features of position i, and token x_{i+1}. `features_TF` is None if the drafter
    takes none. `contexts`: all known tokens per request, int64, empty unless the drafter `needs_contexts`. `chain`:
    inputs of the modules after the first, None for a single module. `target_pages`: the target's entries, of all
    positions up to each request's last row, for a `TargetReader`. `noise`: that of `choose`, None if a grammar also
    limits the choice. `margins` float64 [R, most drafts], None if not wanted: by how much the score of each draft
    exceeds the next best one's (scores: logits, or logits over temperature plus noise). `choose` fills it; a drafter
    that chooses by itself fills it, or leaves infinities.
    """

    next_ids: IntArray  # [T]
    positions: IntArray  # [T]
    query_start: npt.NDArray[np.int32]  # [R + 1]: rows of request r are query_start[r] .. query_start[r + 1]
    features_TF: Tensor | None
    num_drafts: IntArray  # [R]
    contexts: Sequence[IntArray]
    pages: Pages
    choose: Choose
    chain: ModuleChain | None = None
    target_pages: Pages | None = None
    noise: DraftNoise | None = None
    margins: FloatArray | None = None


class Drafter(Protocol):
    """A drafting method. `extend` runs for every batch, and then `draft` if any request gets drafts.

    `kv_layers`: the KV cache spec of each layer. `kv_modules`: for each layer, how many later tokens an entry depends
    on (1: row i takes x_{i+1}; a drafter with a number above 1 is a `ChainDrafter`). None: the layer reads tokens only,
    as the target does, and its rows need not be the ones that the target has just computed. `aux_layers`: target layers
    whose input residual streams `combine` gets.
    """

    @property
    def kv_layers(self) -> Sequence[LayerSpec]: ...
    @property
    def kv_modules(self) -> Sequence[int | None]: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def needs_contexts(self) -> bool: ...

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor | None:
        """Features [T, F] from the target's final-norm states [T, E] and auxiliary states. None if it takes none."""
        ...

    def extend(self, batch: DraftBatch) -> Any:
        """Write the KV of the batch's rows. The result is passed on to `draft`."""
        ...

    def draft(self, batch: DraftBatch, extended: Any) -> list[list[int]]:
        """At most `num_drafts` target ids for each request, to follow its known tokens."""
        ...


class ChainDrafter(Drafter, Protocol):
    """A drafter with several modules that run one after the other: see `ModuleChain`."""

    def mtp_hidden(self, extended: Any) -> Tensor:
        """The rows for the next batch's `ModuleChain.mtp_hidden`: [R, K - 1, E]."""
        ...


@dataclass(frozen=True, slots=True)
class TargetRead:
    """`num_heads`: query heads of a tensor rank."""

    layer: int
    num_heads: int
    head_dim: int
    window: int | None


class TargetReader(Drafter, Protocol):
    """Attends to the target's keys and values, and must not write them. `target_reads`: those of each draft, in order,
    from each request's last row, without scale.
    """

    target_reads: Sequence[TargetRead]


def reads_of(drafter: Drafter | None) -> Sequence[TargetRead]:
    """None for drafters other than a `TargetReader`."""
    reads: Sequence[TargetRead] = getattr(drafter, "target_reads", ())
    return reads


def num_modules(drafter: Drafter | None) -> int:
    return max((module or 1 for module in drafter.kv_modules), default=1) if drafter is not None else 1
