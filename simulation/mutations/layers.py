"""Mutations of layer streaming."""

from __future__ import annotations

from typing import Any

from baton.engine.legs.layer_stream import LayerStream
from baton.handoff.protocol.final_ranges import FinalRanges
from simulation.mutations.registry import Patch, around_method, mutation


@mutation("a layer is final when it is written, and not before")
def _layer_not_written() -> list[Patch]:
    def around(self: LayerStream, written: Any, layer_id: int) -> None:
        later = [layer for layer in sorted(self._groups_of) if layer > layer_id]
        written(later[0] if later else layer_id)

    return around_method(LayerStream, "_written", around)


@mutation("rows are final when all their layers are written")
def _rows_not_written() -> list[Patch]:
    def around(self: LayerStream, rows_written: Any, num_rows: int) -> None:
        rows_written(num_rows + 1)

    return around_method(LayerStream, "_rows_written", around)


@mutation("a layer is final when all tensor ranks have written it")
def _layer_of_one_rank() -> list[Patch]:
    original = LayerStream.__init__

    def init(self: LayerStream, agent: Any, cache: Any, groups: Any, many_ranks: bool, *rest: Any) -> None:
        original(self, agent, cache, groups, False, *rest)

    return [(LayerStream, "__init__", init)]


@mutation("layers of a forward that failed are copied again", ("engine_abort", "slow_engine", "burst"))
def _layers_not_withdrawn() -> list[Patch]:
    return [(LayerStream, "withdraw", lambda self: None)]


@mutation("tokens are copied when all their layers are final")
def _one_layer_is_all() -> list[Patch]:
    def around(self: FinalRanges, written: Any, event: Any) -> None:
        written(event)
        self.extend(event.final)

    return around_method(FinalRanges, "written", around)
