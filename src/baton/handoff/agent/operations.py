"""Outstanding copies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.errors import BatonError, ProtocolError
from baton.handoff.agent.stats import CopyStats
from baton.handoff.plan.planner import CopyList, Instance
from baton.handoff.plan.repeated import CopyPlanner
from baton.handoff.plan.topology import senders
from baton.handoff.protocol.events import CopyEnded, StartCopy
from baton.kv.interval import ALL_LAYERS
from baton.transports.base import Direction, Operation, Peer, Transport

log = logging.getLogger(__name__)
_Owner = TypeVar("_Owner")


@dataclass(slots=True)
class _Running(Generic[_Owner]):
    owner: _Owner
    copy_id: int
    operation: Operation
    num_bytes: int
    num_runs: int
    peer: Peer
    direction: Direction
    group: str
    posted: float
    cancelled: bool = False


class Operations(Generic[_Owner]):
    """Each copy belongs to one attempt. Not thread-safe; `wake` is called on any thread when a copy ends."""

    def __init__(self, transport: Transport, wake: Callable[[], None]) -> None:
        self._transport = transport
        self._wake = wake
        self._running: list[_Running[_Owner]] = []
        self._planner = CopyPlanner()
        self.stats = CopyStats()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_unknown(self) -> int:
        """Cancelled copies that have not ended. Thread-safe."""
        return sum(run.cancelled for run in self._running)

    def start(
        self,
        owner: _Owner,
        copy: StartCopy,
        peer: Peer,
        direction: Direction,
        source: Instance,
        dest: Instance,
        tag: str,
    ) -> CopyEnded | None:
        """Returns the end of a copy that could not start."""
        try:
            began = time.perf_counter()
            copies = self._plan(copy, source, dest)
            if copies is None:
                return CopyEnded(copy.copy_id, ok=True)
            planned = time.perf_counter()
            operation = self._transport.submit(peer, direction, copies, tag)
        except Exception as error:
            if not isinstance(error, BatonError):
                log.exception("copy %s could not be started", tag)
            return CopyEnded(copy.copy_id, ok=False, message=f"group {copy.group}: {error}")
        posted = time.perf_counter()
        self.stats.plan.observe(planned - began)
        self.stats.post.observe(posted - planned)
        self.stats.runs.observe(len(copies))
        self._running.append(
            _Running(owner, copy.copy_id, operation, copies.total, len(copies), peer, direction, copy.group, posted)
        )
        operation.add_done_callback(self._wake)
        return None

    def _plan(self, copy: StartCopy, source: Instance, dest: Instance) -> CopyList | None:
        """None if the source has none of these layers.

        Raises `ProtocolError` if the source has nothing else to send: the destination would have a gap.
        """
        geometry = dest.own.get(copy.group)
        if geometry is not None:
            sources, pages = source.groups[copy.group], (copy.source_pages, copy.dest_pages)
            if copy.layers.start > max(layer for each in sources for layer in each.geometry.layer_ids):
                return None  # the rest of an interval whose last layers are being copied
            if copies := self._planner.plan(sources, geometry, *pages, copy.tokens, copy.layers, source.rank):
                return copies
            if copy.layers is not ALL_LAYERS and source.rank in senders(sources, geometry):
                return None
        raise ProtocolError(f"rank {source.rank} has nothing for rank {dest.rank}")

    def ended(self) -> list[tuple[_Owner, CopyEnded]]:
        """Copies that ended since the last call.

        A cancelled write ends at the latest with its peer's fence. A cancelled read does not: this side itself may
        still write its pages.
        """
        out: list[tuple[_Owner, CopyEnded]] = []
        still: list[_Running[_Owner]] = []
        for run in self._running:
            state = run.operation.poll()
            if state == "pending" and run.cancelled and run.direction == "write" and run.peer.fenced():
                out.append((run.owner, CopyEnded(run.copy_id, ok=False, message="the peer is fenced")))
            elif state == "pending":
                still.append(run)
            elif state == "done":
                self.stats.transfer.observe(time.perf_counter() - run.posted)
                self.stats.bytes[run.group] += run.num_bytes
                end = CopyEnded(run.copy_id, ok=True, num_bytes=run.num_bytes, num_runs=run.num_runs)
                out.append((run.owner, end))
            else:
                message = run.operation.error or "copy failed"
                out.append((run.owner, CopyEnded(run.copy_id, ok=False, message=message)))
        self._running = still
        return out

    def cancel(self, owner: _Owner, copy_ids: tuple[int, ...]) -> list[CopyEnded]:
        """Returns the copies that ended at once."""
        out: list[CopyEnded] = []
        still: list[_Running[_Owner]] = []
        for run in self._running:
            if run.owner is owner and run.copy_id in copy_ids:
                self._transport.cancel(run.operation)
                run.cancelled = True
                if run.operation.poll() != "pending":
                    out.append(CopyEnded(run.copy_id, ok=False, message="cancelled"))
                    continue
            still.append(run)
        self._running = still
        return out
