"""States of recurrent layers. A forward reads one slot per request and writes others, so it can be repeated after a
failure, and states that a later step may need stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.step_plans import IntArray, StateSlots
from baton.errors import BatonError
from baton.kv.geometry import NULL_PAGE
from baton.models.layer_cache import Recurrence, ScanRows


@dataclass(frozen=True)
class StateBatch:
    """The rows of a forward for one state group. `query_start`: as `ScanRows`."""

    query_start: np.ndarray
    slots: StateSlots

    @functools.cached_property
    def last_slot(self) -> int:
        """Raises as `scan`."""
        slots = self.slots
        used = np.concatenate((slots.write, slots.read))
        if np.any(slots.write <= NULL_PAGE) or used.min(initial=0) < 0:
            raise BatonError("scan: a row's state would come from, or go to, no slot")
        if np.unique(slots.write).size < slots.write.size or np.intersect1d(slots.write, slots.read).size:
            raise BatonError("scan: a state would be written over another of this step")
        if len(slots.read) != len(self.query_start) - 1 or len(slots.kept) != len(slots.write):
            raise BatonError("scan: slots are not one for each request, and one for each kept row")
        return int(used.max(initial=0))


def scan(planes: Sequence[Tensor], layer: int, batch: StateBatch, recurrence: Recurrence) -> Tensor:
    """Run one layer's recurrence from and to slots of its group's `planes` [slots, layers, 1, heads, dim].

    Raises `BatonError` for wrong slots, and for states whose shape differs from the planes'.
    """
    slots, device = batch.slots, planes[0].device
    if batch.last_slot >= planes[0].shape[0]:
        raise BatonError("scan: a row's state would come from, or go to, no slot")
    write = _index(slots.write, device)
    states = tuple(_read(plane[:, layer, 0], slots.read) for plane in planes)
    out, kept = recurrence(states, ScanRows(batch.query_start, slots.kept))
    for plane, values in zip(planes, kept, strict=True):
        if values.shape != (len(slots.write), *plane.shape[3:]):
            raise BatonError(f"scan: states of shape {tuple(values.shape)} for {len(slots.write)} rows of a plane")
    for plane, values in zip(planes, kept, strict=True):
        plane[:, layer, 0][write] = values.to(plane.dtype)
    return out


def _read(states: Tensor, slots: IntArray) -> Tensor:
    """Null slot: the request begins."""
    found, begins = states[_index(slots, states.device)], slots == NULL_PAGE
    if not begins.any():
        return found
    return found.masked_fill(torch.from_numpy(begins).to(states.device)[:, None, None], 0)


def _index(slots: IntArray, device: torch.device) -> Tensor | slice:
    """One slot gives a view: copies take as long as the recurrence."""
    if len(slots) == 1:
        return slice(int(slots[0]), int(slots[0]) + 1)
    return torch.from_numpy(slots).to(device)
