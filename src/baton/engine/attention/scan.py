"""States of recurrent layers. A forward reads one slot per request and writes others, so it can be repeated after a
failure, and states that a later step may need stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.step_plans import StateSlots
from baton.errors import BatonError
from baton.kv.geometry import NULL_PAGE
from baton.models.layer_cache import Recurrence, ScanRows


@dataclass(frozen=True, slots=True)
class StateBatch:
    query_start: np.ndarray
    slots: StateSlots


def scan(planes: Sequence[Tensor], layer: int, batch: StateBatch, recurrence: Recurrence) -> Tensor:
    """Run one layer's recurrence from and to slots of its group's `planes` [slots, layers, 1, heads, dim].

    Raises `BatonError` for a slot that does not exist, is written twice, or is both read and written, and for states
    whose shape differs from the planes'.
    """
    slots, count = batch.slots, planes[0].shape[0]
    used = np.concatenate((slots.write, slots.read))
    if np.any(slots.write <= NULL_PAGE) or used.min(initial=0) < 0 or used.max(initial=0) >= count:
        raise BatonError("scan: a row's state would come from, or go to, no slot")
    if np.unique(slots.write).size < slots.write.size or np.intersect1d(slots.write, slots.read).size:
        raise BatonError("scan: a state would be written over another of this step")
    if len(slots.read) != len(batch.query_start) - 1 or len(slots.kept) != len(slots.write):
        raise BatonError("scan: slots are not one for each request, and one for each kept row")
    device = planes[0].device
    read, write = torch.from_numpy(slots.read).to(device), torch.from_numpy(slots.write).to(device)
    begins = (read == NULL_PAGE)[:, None, None]
    # The null slot: the request begins.
    states = tuple(plane[read, layer, 0].masked_fill(begins, 0) for plane in planes)
    out, kept = recurrence(states, ScanRows(batch.query_start, slots.kept))
    for plane, values in zip(planes, kept, strict=True):
        if values.shape != (len(write), *plane.shape[3:]):
            raise BatonError(f"scan: states of shape {tuple(values.shape)} for {len(write)} rows of a plane")
    for plane, values in zip(planes, kept, strict=True):
        plane[write, layer, 0] = values.to(plane.dtype)
    return out
