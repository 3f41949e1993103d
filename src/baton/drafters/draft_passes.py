"""The passes in which a head drafts for a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from baton.drafters.base import DraftBatch
from baton.drafters.chain import IntArray
from baton.models.fused_drafts import DraftPass
from baton.models.layer_cache import KVRegions, LayerCache

RegionsOf = Callable[[int, LayerCache], KVRegions | None]


def draft_passes(
    batch: DraftBatch, regions_of: RegionsOf, last_only: bool = False
) -> list[tuple[DraftPass, IntArray]] | None:
    """Each pass with the requests that it drafts for: first the batch's rows (`last_only`: their last ones), then a row
    per request. None if a grammar limits drafts, or `regions_of` gives none."""
    if batch.noise is None:
        return None
    num_drafts, last = batch.num_drafts, batch.query_start[1:].astype(np.int64) - 1
    going = np.flatnonzero(num_drafts)
    passes: list[tuple[DraftPass, IntArray]] = []
    one: DraftPass | None = None
    if not last_only:
        requests = np.arange(len(num_drafts))
        regions = regions_of(len(batch.positions), batch.pages.bind(requests, batch.positions, batch.query_start))
        if regions is None:
            return None
        passes.append(
            (_with_noise(DraftPass(regions, batch.positions, last[going], len(going)), batch, going, 0), going)
        )
    for step in range(len(passes), int(num_drafts.max(initial=0))):
        more = np.flatnonzero(num_drafts[going] > step)
        positions = batch.positions[last[going[more]]] + step
        if one is not None and len(more) == len(going):
            # The same requests, one position later.
            regions = replace(one.regions, positions=one.regions.positions + 1)
            one = replace(one, regions=regions, positions=positions, sources=None)
        else:
            going = going[more]
            starts = np.arange(len(going) + 1, dtype=np.int32)
            regions = regions_of(len(going), batch.pages.bind(going, positions, starts))
            if regions is None:
                return None
            one = DraftPass(regions, positions, None, len(going), more)
        passes.append((_with_noise(one, batch, going, step), going))
    return passes


def _with_noise(one: DraftPass, batch: DraftBatch, going: IntArray, step: int) -> DraftPass:
    noise = batch.noise(going, step) if batch.noise is not None else None
    if noise is None:
        return one
    temperatures, noises = noise
    return replace(one, temperatures=temperatures, noises=noises)
