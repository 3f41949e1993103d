"""Mutations of what makes one request of many pairs of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.handoff.plan import planner, topology
from baton.handoff.protocol.events import DecodeCommitted, PrefillReleased
from baton.handoff.protocol.gather import DecodeGather, PrefillGather
from simulation.mutations.registry import Patch, mutation


@mutation("D is committed when all of its ranks are")
def _commit_without_one_rank() -> list[Patch]:
    original = DecodeGather._end

    def end(self: DecodeGather, pair: Any, event: Any) -> list[Any]:
        out = original(self, pair, event)
        samples = isinstance(event, DecodeCommitted) and pair[0] == self._sampling
        return out or ([replace(event, key=self._key)] if samples else [])

    return [(DecodeGather, "_end", end)]


@mutation("P's pages stay until all pairs of ranks have ended")
def _one_rank_releases() -> list[Patch]:
    def handle(self: PrefillGather, pair: Any, event: PrefillReleased) -> list[Any]:
        return [replace(event, key=self._key)]

    return [(PrefillGather, "handle", handle)]


@mutation("a rank is sent the heads that it owns")
def _wrong_head_share() -> list[Patch]:
    def assign(sources: Any, dest: Any) -> Any:
        shares = topology.assign(sources, dest)
        return {rank: tuple(replace(box, source_head=0) for box in boxes) for rank, boxes in shares.items()}

    return [(planner, "assign", assign)]
