"""Slots that the forwards of a drafter with states read and write (docs/drafters.md, "Draft models with states")."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.engine.step_plans import DraftPlan, DraftSlots, Int32Array, IntArray, StateSlots


class DraftStates:
    """The slots of one draft plan. Call `bind` for each forward, in order."""

    def __init__(self, plan: DraftPlan) -> None:
        rows = plan.rows
        self._groups, self._num_drafts = plan.states, plan.num_drafts
        self._start = rows.positions[rows.query_start[:-1]]
        self._stop = rows.positions[rows.query_start[1:] - 1] + 1
        self._seen = self._start.copy()  # [R]: tokens that the kept state has seen

    def bind(self, requests: IntArray, positions: IntArray, query_start: Int32Array) -> dict[str, StateSlots]:
        """The slots of a forward by group; rows as in `Pages.bind`."""
        if not self._groups:
            return {}
        first, last = positions[query_start[:-1]], positions[query_start[1:] - 1]
        start, stop = self._start[requests], self._stop[requests]
        # Keep the state after the last known row, and after the last row if another draft follows.
        known, known_last = first < stop, np.minimum(last, stop - 1)
        goes_on = (last >= stop) & (last - stop < self._num_drafts[requests] - 1)
        self._seen[requests[known]] = known_last[known] + 1
        row_of = query_start[:-1] - first  # the row of position 0
        place = np.full(len(self._start), -1)
        place[requests] = np.arange(len(requests))
        by_group = {}
        for name, slots in self._groups.items():
            read = np.where(first == start, slots.read[requests], _scratch(slots, requests, first - 1 - stop))
            at, row = place[slots.request], slots.num_tokens - 1
            passed = (at >= 0) & (row >= first[at]) & (row < known_last[at])
            kept = (row_of + known_last)[known], (row_of + last)[goes_on], (row_of[at] + row)[passed]
            write = (
                slots.scratch[requests[known], 0],
                _scratch(slots, requests, last - stop)[goes_on],
                slots.write[passed],
            )
            order = np.argsort(rows := np.concatenate(kept))
            by_group[name] = StateSlots(read, rows[order], np.concatenate(write)[order])
        return by_group

    def left_out(self) -> Iterator[tuple[str, int, int]]:
        """Copies (group, source, destination) for requests whose last known row is beyond the drafter's context: the
        last state that it saw stands for all later ones.
        """
        for request in np.flatnonzero(self._seen < self._stop).tolist():
            for name, slots in self._groups.items():
                kept = int(slots.scratch[request, 0])
                if self._seen[request] == self._start[request]:
                    yield name, int(slots.read[request]), kept
                later = (slots.request == request) & (slots.num_tokens >= self._seen[request])
                for checkpoint in slots.write[later].tolist():
                    yield name, kept, checkpoint


def _scratch(slots: DraftSlots, requests: IntArray, ahead: IntArray) -> IntArray:
    """The slot of the state `ahead` rows after the first draft's row; if negative, that of the last known row."""
    index = np.where(ahead < 0, 0, 1 + ahead % 2)
    chosen: IntArray = slots.scratch[requests, np.minimum(index, slots.scratch.shape[1] - 1)]
    return chosen
