"""Runs digests on a worker, and returns them as events of the state machines."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.digests import Cell, Digester, find_mismatches
from baton.handoff.session.base import Worker

_Owner = TypeVar("_Owner")
Shares = Callable[[str], Sequence[Cell]]


class Digesting(Generic[_Owner]):
    """Each running digest has an owner (an attempt), which may end first. Not thread-safe; the worker's thread
    calls `wake` when a digest ends.
    """

    def __init__(
        self,
        digester: Digester,
        geometries: Mapping[str, RankGeometry],
        worker: Worker,
        wake: Callable[[], None],
    ) -> None:
        self._digester = digester
        self._geometries = geometries
        self._worker = worker
        self._wake = wake
        self._done: queue.SimpleQueue[tuple[_Owner, ev.MachineEvent]] = queue.SimpleQueue()

    def begin(self, owner: _Owner, action: ev.ComputeDigests | ev.CheckDigests, shares: Shares) -> None:
        """`shares`: per group, the cells that the two ranks exchange."""

        def job() -> None:
            self._done.put((owner, self._answer(action, shares)))
            self._wake()

        self._worker.start(job)

    def _answer(self, action: ev.ComputeDigests | ev.CheckDigests, shares: Shares) -> ev.MachineEvent:
        try:
            if isinstance(action, ev.ComputeDigests):
                group, pages = action.group, action.pages
                cells = shares(group)
                pieces = [p for part in action.intervals for p in self._digester.digests(group, pages, part, cells)]
                return ev.DigestsComputed(group, pieces)
            every = {group: shares(group) for group in action.digests}
            bad = find_mismatches(self._digester, self._geometries, action.digests, action.pages, every)
            return ev.DigestsChecked(action.check_id, tuple(bad))
        except Exception as error:  # an attempt without an answer would wait forever
            return ev.Fault("transfer_failed", f"no digest: {error}")

    def ended(self) -> list[tuple[_Owner, ev.MachineEvent]]:
        """Jobs that ended since the last call."""
        out = []
        while not self._done.empty():
            out.append(self._done.get_nowait())
        return out
