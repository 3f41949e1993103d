"""The interface of attention kernels.

Shapes: T rows of the step, R requests, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from baton.models.layer_cache import AttnRows

T = TypeVar("T")


@dataclass(slots=True)
class AttnBatch:
    """The rows of one forward for one KV group, concatenated over R requests. A request's rows have consecutive
    positions.
    """

    query_start: np.ndarray  # int32 [R + 1]: rows of request r are query_start[r] .. query_start[r + 1]
    positions: np.ndarray  # int64 [T]: of each row, and of its slot
    page_table: np.ndarray  # int32 [R, max_pages]: page ids of this group, in token order
    _plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, once per `key` and forward."""
        if key not in self._plans:
            self._plans[key] = make()
        plan: T = self._plans[key]
        return plan


class AttentionBackend(Protocol):
    """`batch_invariant`: a row's result depends only on its own query and visible keys."""

    name: str
    batch_invariant: bool

    def write_and_attend(self, kv: Tensor, layer: int, rows: AttnRows, batch: AttnBatch, window: int | None) -> Tensor:
        """Write k and v, if any, then attend causally. Returns [T, H, D] in q's dtype.

        `kv` is the group's region [pages, layers, 2, page_size, G, D]. `layer` indexes its second dimension. `window`:
        as `KVLayerSpec`. Raises `BatonError` for a bad slot: in the null page, or outside the page table.
        """
        ...
