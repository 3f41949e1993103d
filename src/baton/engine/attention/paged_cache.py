"""The `LayerCache` of a forward over pages: finds a layer's entries, and calls the kernel of its kind.

Shapes: T rows of the step, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.attention.base import AttentionBackend, AttnBatch
from baton.engine.attention.compressed import attend_window
from baton.engine.attention.latent import PagedLatentAttention, PagedLatents
from baton.engine.attention.paged_cpu import BatchAddresses, PagedCpuBackend
from baton.engine.attention.scan import StateBatch, scan
from baton.engine.attention.sparse import choose_keys
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.step_plans import Written
from baton.kv.spec import INDEX_PLANE, GroupSpec
from baton.models.layer_cache import (
    AttnRows,
    Chosen,
    IndexRows,
    KVRegion,
    KVRegions,
    LatentRows,
    LayerSpec,
    Recurrence,
    WindowRows,
)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's entries are: its group's memory, and its index there. `window`: visible entries."""

    memory: GroupMemory
    index: int
    window: int | None


class LayerMap(dict[int, list[LayerPlace]]):
    """Each layer's places, one in each of its groups."""

    @functools.cached_property
    def in_place(self) -> tuple[dict[str, Tensor], npt.NDArray[np.int64]] | None:
        """Keys and values by group, and `KVRegions.layers`."""
        groups: dict[str, Tensor] = {}
        rows: list[tuple[int, int, int]] = []
        for layer_id, places in sorted(self.items()):
            kv, name = places[0].memory.kv, places[0].memory.spec.name
            if layer_id != len(rows) or len(places) > 1 or kv is None or not kv.is_contiguous():
                return None
            groups[name] = kv
            rows.append((list(groups).index(name), places[0].index, places[0].window or 0))
        return (groups, np.array(rows, dtype=np.int64)) if rows else None

    def clear(self) -> None:
        super().clear()
        self.__dict__.clear()


def layer_map(groups: Sequence[GroupSpec], kv: Mapping[str, GroupMemory], specs: Sequence[LayerSpec]) -> LayerMap:
    places = LayerMap()
    for group in groups:
        for index, layer in enumerate(group.layer_ids):
            place = LayerPlace(kv[group.name], index, getattr(specs[layer], "window", None))
            places.setdefault(layer, []).append(place)
    return places


class PagedCache:
    """`batches` and `states`: by group, the rows of the forward. `written` is called with each layer whose entries are
    written."""

    def __init__(
        self,
        backend: AttentionBackend,
        layers: LayerMap,
        batches: Mapping[str, AttnBatch],
        states: Mapping[str, StateBatch],
        written: Written | None = None,
    ) -> None:
        self._backend, self._layers, self._batches, self._states = backend, layers, batches, states
        self._written = written
        self.chosen: Chosen | None = None

    def __call__(self, layer_id: int, rows: AttnRows) -> Tensor:
        out = self._attend(layer_id, rows, self._place(layer_id).window)
        if self._written is not None:
            self._written(layer_id)
        return out

    def regions(self) -> KVRegions | None:
        in_place = self._layers.in_place
        by_layer = self._written is not None and self._written.at_once
        if in_place is None or by_layer or not isinstance(self._backend, PagedCpuBackend):
            return None
        groups, layers = in_place
        batches = {name: BatchAddresses.of(self._batches[name]) for name in groups}
        regions = tuple(KVRegion(kv, batches[name].arrays[2]) for name, kv in groups.items())
        positions, query_start, _ = next(iter(batches.values())).arrays
        wrote = None if self._written is None else functools.partial(_wrote, self._written, len(positions))
        return KVRegions(query_start, positions, regions, layers, wrote)

    def write(self, layer_id: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        # A window of 1 costs almost nothing.
        self._attend(layer_id, AttnRows(k_TGD, k_TGD, v_TGD, 1.0), window=1)

    def attend_kept(self, layer_id: int, q_THD: Tensor, scale: float, window: int | None) -> Tensor:
        return self._attend(layer_id, AttnRows(q_THD, None, None, scale), window)

    def _place(self, layer_id: int) -> LayerPlace:
        (place,) = self._layers[layer_id]
        return place

    def _attend(self, layer_id: int, rows: AttnRows, window: int | None) -> Tensor:
        place = self._place(layer_id)
        kv, batch = place.memory.kv, self._batches[place.memory.spec.name]
        assert kv is not None
        return self._backend.write_and_attend(kv, place.index, rows, batch, window)

    def attend_latent(self, layer_id: int, rows: LatentRows) -> Tensor:
        out = self._latents(layer_id).attend(rows)
        if self._written is not None:
            self._written(layer_id)
        return out

    def write_latent(self, layer_id: int, latent_TC: Tensor, rope_TR: Tensor) -> None:
        self._latents(layer_id).write(torch.cat((latent_TC, rope_TR), dim=-1))

    def _latents(self, layer_id: int) -> PagedLatentAttention:
        place = self._place(layer_id)
        memory, index = place.memory, place.index
        planes = [plane for plane, of in zip(memory.planes, memory.spec.planes, strict=True) if of.name != INDEX_PLANE]
        return PagedLatentAttention(planes, index, self._batches[memory.spec.name])

    def choose(self, layer_id: int, rows: IndexRows) -> None:
        place = self._place(layer_id)
        memory, index = place.memory, place.index
        names = [plane.name for plane in memory.spec.planes]
        plane = memory.planes[names.index(INDEX_PLANE)]
        self.chosen = choose_keys(plane, index, self._batches[memory.spec.name], rows)

    def attend_window(self, layer_id: int, rows: WindowRows) -> Tensor:
        parts = {
            spec.name: PagedLatents([plane], place.index, self._batches[place.memory.spec.name])
            for place in self._layers[layer_id]
            for spec, plane in zip(place.memory.spec.planes, place.memory.planes, strict=True)
        }
        out = attend_window(parts, rows)
        if self._written is not None:
            self._written(layer_id)
        return out

    def scan(self, layer_id: int, recurrence: Recurrence) -> Tensor:
        place = self._place(layer_id)
        memory, index = place.memory, place.index
        return scan(memory.planes, index, self._states[memory.spec.name], recurrence)


def _wrote(written: Written, num_rows: int, layers: range, first_rows: int) -> None:
    if first_rows < num_rows:
        written.tell_rows(first_rows)
        return
    for layer_id in layers:
        written(layer_id)
