"""What a drafter is to the engine: it guesses the tokens that the target will choose next.

A drafter is given data and two doors, `Pages` to KV of its own and `Choose` to the sampling noise; never the runner,
requests or pools. Shapes: R requests, T rows of all of them side by side, F width of a row of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.drafters.chain import IntArray, ModuleChain
from baton.models.cache import LayerCache, LayerSpec


class Pages(Protocol):
    """The drafter's KV and states of a batch's requests."""

    def bind(self, requests: IntArray, positions: IntArray, query_start: npt.NDArray[np.int32]) -> LayerCache:
        """The cache for one forward over rows of some of the batch's requests.

        `positions` int64 [T]; rows of the i-th of `requests` are query_start[i] .. query_start[i + 1], int32 [R + 1].
        States go by position, too: the batch's rows of a request, with what is drafted first, go on from the state that
        the batch before has left, and each further draft from that of the position before it.
        """
        ...


class Choose(Protocol):
    """Picks drafts as the target will pick tokens: with the noise of each request's own position."""

    def __call__(self, logits_RV: Tensor, requests: IntArray, step: int, target_ids: Tensor | None) -> IntArray:
        """Target ids int64 [R] of draft number `step` (from 0) of those of the batch's `requests`.

        `logits_RV` [R, draft_vocab]; `target_ids` int64 [draft_vocab] maps draft ids to target ids, None where they
        are the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Rows of which the next token has become known, and how many drafts each request gets behind its last row.

    Row i of a request: the target's features of position i, and token x_{i+1}. `features_TF` is None where the drafter
    takes none. `contexts`: all known tokens per request, int64, where the drafter asks for them; else empty. `chain`:
    where the drafter has modules beyond the first, what they need.
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


class Drafter(Protocol):
    """One method of drafting. `extend` runs for every batch, `draft` behind it where a request gets drafts.

    `kv_layers`: what its layers keep; none needs no pages, layers of several kinds or shapes are several groups.
    `kv_modules`: for each of them, how many tokens beyond its own an entry depends on (1: row i takes x_{i+1}; with one
    above 1 it is a `ChainDrafter`); None: it sees tokens alone, as the target does, and its rows need not be those that
    the target has just computed.
    `aux_layers`: target layers whose entering residual streams `combine` gets. `needs_contexts`: whether batches bring
    all known tokens of their requests.
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
        """Features [T, F] from the target's final-norm states [T, E] and auxiliary states; None: it takes none."""
        ...

    def extend(self, batch: DraftBatch) -> Any:
        """Write the KV of the batch's rows. What is returned is passed to `draft`, and kept no longer."""
        ...

    def draft(self, batch: DraftBatch, extended: Any) -> list[list[int]]:
        """For each request at most `num_drafts` target ids, the likeliest continuation of its known tokens."""
        ...


class ChainDrafter(Drafter, Protocol):
    """A drafter of several modules that are used one after the other: see `ModuleChain`."""

    def carried(self, extended: Any) -> Tensor:
        """What `extend` leaves for the next batch's `ModuleChain.carried`: [R, K - 1, E]."""
        ...


def num_modules(drafter: Drafter | None) -> int:
    """Of how many modules a drafter is a chain; 1 of any other, and of none."""
    return max((module or 1 for module in drafter.kv_modules), default=1) if drafter is not None else 1
