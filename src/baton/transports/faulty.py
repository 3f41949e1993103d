"""`faulty+SCHEME://?fault=...`: another transport with one deterministic defect, to show that a test can fail.

Options: `fault` (below), `region` (only copies from this region index; default all), `every` (only each n-th of these,
from the first; default 1), `page_bytes` (default: the greatest that divides its offsets and lengths),
`delay_s` (default 0.02), `nbytes` (of `corrupt`; default 1). Other options go to the wrapped transport.

| fault | effect on a submission |
|---|---|
| `drop` | reported as done, nothing is copied |
| `drop-draft` | `drop` with region 1, where an engine keeps its drafter |
| `drop-last-page` | the last `page_bytes` at the destination are not copied, reported as done |
| `shift-page` | every run is read one page too early |
| `corrupt` | after the copy, `nbytes` bytes of the longest run are inverted at the destination |
| `fail` | half of the runs are copied, then it fails |
| `delay` | starts `delay_s` late |
| `reorder` | runs after the next submission, if that comes within `delay_s` |
| `duplicate` | is copied twice |
| `stale-seed` | the seeds are those of the previous request (`alter_seeds`) |
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from baton.errors import BatonError, ConfigError
from baton.kv.geometry import CopyList
from baton.transports.base import (
    ByteArray,
    Direction,
    Operation,
    Peer,
    Region,
    Transport,
    check_copies,
    check_regions,
)
from baton.transports.mapped.memory_transport import MemoryPeer

FaultKind = Literal[
    "drop",
    "drop-draft",
    "drop-last-page",
    "shift-page",
    "corrupt",
    "fail",
    "delay",
    "reorder",
    "duplicate",
    "stale-seed",
]
DRAFT_REGION = 1
SeedsT = TypeVar("SeedsT")  # a type of the handoff


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fault: FaultKind
    region: int | None = None
    every: int = 1
    page_bytes: int | None = None
    delay_s: float = 0.02
    nbytes: int = 1


def parse_fault(query: dict[str, str]) -> tuple[FaultSpec, dict[str, str]]:
    """Split a URI's options into the fault's and the wrapped transport's."""
    own = {key: value for key, value in query.items() if key in FaultSpec.__struct_fields__}
    try:
        spec = msgspec.convert(own, FaultSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("transport", f"faulty: {error}") from error
    numbers = (spec.every, spec.nbytes, 1 if spec.page_bytes is None else spec.page_bytes)
    if min(numbers) < 1 or not 0 <= spec.delay_s <= 60 or (spec.region or 0) < 0:
        raise ConfigError("transport", f"faulty: an option is out of range in {own}")
    return spec, {key: value for key, value in query.items() if key not in own}


class _FaultyOperation(Operation):
    """`guard` orders its steps with a cancel."""

    __slots__ = ("copies", "direction", "guard", "inner", "peer", "stop")

    def __init__(self, tag: str, peer: Peer, direction: Direction, copies: CopyList) -> None:
        super().__init__(tag)
        self.peer = peer
        self.direction = direction
        self.copies = copies
        self.inner: Operation | None = None
        self.guard = threading.Lock()
        self.stop = threading.Event()


class FaultyTransport:
    def __init__(self, inner: Transport, spec: FaultSpec) -> None:
        self._inner = inner
        self._spec = spec
        self._region = DRAFT_REGION if spec.fault == "drop-draft" and spec.region is None else spec.region
        self._regions: list[ByteArray] = []
        self._seen = 0
        self._lock = threading.Lock()
        self._pending: list[_FaultyOperation] = []
        self._jobs: queue.SimpleQueue[_FaultyOperation | None] = queue.SimpleQueue()
        self._last_seeds: Any = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="baton-faulty", daemon=True)
        self._thread.start()

    @property
    def scheme(self) -> str:
        return f"faulty+{self._inner.scheme}"

    def alter_seeds(self, seeds: SeedsT) -> SeedsT:
        """The seeds to hand over: with `stale-seed`, those of the previous call."""
        last: SeedsT | None = self._last_seeds
        self._last_seeds = seeds
        return last if last is not None and self._spec.fault == "stale-seed" else seeds

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        return self._inner.allocate(name, nbytes)

    def register(self, regions: Sequence[Region]) -> bytes:
        memory = check_regions(regions)
        descriptor = self._inner.register(memory)
        self._regions = memory
        return descriptor

    def connect(self, descriptor: bytes) -> Future[Peer]:
        return self._inner.connect(descriptor)

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        with self._lock:
            hit = self._region is None or copies.source_region == self._region
            if hit:
                self._seen += 1
                hit = (self._seen - 1) % self._spec.every == 0
            # The wrapped transport refuses with its own error.
            if not hit or self._closed or not peer.alive() or len(copies) == 0:
                return self._inner.submit(peer, direction, copies, tag)
            own, far = [region.size for region in self._regions], peer.region_sizes
            check_copies(copies, *((own, far) if direction == "write" else (far, own)))
            if self._spec.fault in ("drop", "drop-draft", "drop-last-page", "shift-page"):
                return self._inner.submit(peer, direction, _change(copies, self._spec), tag)
            operation = _FaultyOperation(tag, peer, direction, copies)
            self._pending = [op for op in self._pending if op.poll() == "pending"]
            self._pending.append(operation)
            self._jobs.put(operation)
        return operation

    def cancel(self, operation: Operation) -> None:
        if not isinstance(operation, _FaultyOperation):
            self._inner.cancel(operation)
            return
        with operation.guard:
            operation.flags[0] = 1
            operation.stop.set()
            inner = operation.inner
        operation.withdraw("cancelled before it began")
        if inner is not None:
            self._inner.cancel(inner)

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            pending = [op for op in self._pending if op.peer is peer]
        for operation in pending:
            self.cancel(operation)
        self._inner.disconnect(peer)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = list(self._pending)
        for operation in pending:
            self.cancel(operation)
        self._jobs.put(None)
        self._thread.join()
        self._inner.close()

    def _run(self) -> None:
        while (operation := self._jobs.get()) is not None:
            later: _FaultyOperation | None = None
            if self._spec.fault == "reorder":
                try:
                    later = self._jobs.get(timeout=self._spec.delay_s)
                except queue.Empty:
                    pass
                else:
                    if later is None:
                        self._jobs.put(None)
            for each in (later, operation):
                if each is not None and each.start():
                    try:
                        each.end(self._perform(each))
                    except BatonError as error:
                        each.end(str(error))

    def _perform(self, operation: _FaultyOperation) -> str | None:
        fault, copies = self._spec.fault, operation.copies
        if fault == "delay":
            operation.stop.wait(self._spec.delay_s)
        if fault == "fail":
            half = slice(0, len(copies) // 2)
            error = self._copy(operation, _part(copies, half))
            return error or "injected failure"
        error = self._copy(operation, copies)
        if error is None and fault == "duplicate":
            error = self._copy(operation, copies)
        if error is None and fault == "corrupt":
            error = self._invert(operation)
        return error

    def _copy(self, operation: _FaultyOperation, copies: CopyList) -> str | None:
        with operation.guard:
            if operation.flags[0]:
                return "cancelled"
            inner = self._inner.submit(operation.peer, operation.direction, copies, operation.tag)
            operation.inner = inner
        inner.wait()
        return inner.error

    def _invert(self, operation: _FaultyOperation) -> str | None:
        copies, peer = operation.copies, operation.peer
        if operation.direction == "read":
            dests = self._regions
        elif isinstance(peer, MemoryPeer):
            dests = peer.regions
        else:
            return "corrupt needs mapped memory to write to"
        run = int(np.argmax(copies.nbytes))
        count = min(self._spec.nbytes, int(copies.nbytes[run]))
        # Its last byte holds sign and exponent of a little-endian float.
        stop = int(copies.dest_offset[run] + copies.nbytes[run])
        with operation.guard:
            if operation.flags[0]:
                return "cancelled"
            dests[copies.dest_region][stop - count : stop] ^= 0xFF
        return None


def _part(copies: CopyList, rows: slice | np.ndarray) -> CopyList:
    return CopyList(
        copies.source_region,
        copies.dest_region,
        copies.source_offset[rows],
        copies.dest_offset[rows],
        copies.nbytes[rows],
    )


def _change(copies: CopyList, spec: FaultSpec) -> CopyList:
    """For faults that only change the list."""
    if spec.fault in ("drop", "drop-draft"):
        return _part(copies, slice(0, 0))
    page = spec.page_bytes
    if page is None:
        page = int(np.gcd.reduce(np.concatenate((copies.source_offset, copies.dest_offset, copies.nbytes))))
    source, dest, nbytes = copies.source_offset.copy(), copies.dest_offset, copies.nbytes.copy()
    if spec.fault == "shift-page":
        # Whole pages stay inside, since page 0 is never sent; the bound is for other lists.
        source = np.maximum(source - page, 0)
    else:
        last = int(np.argmax(dest))
        cut = int(dest[last] + nbytes[last]) - page
        nbytes = np.clip(cut - dest, 0, nbytes)
    return CopyList(copies.source_region, copies.dest_region, source, dest, nbytes)
