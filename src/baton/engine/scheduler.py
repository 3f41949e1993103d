"""Continuous batching with chunked prefill under a token budget, and preemption by recompute.

A verification is scheduled whole or not at all: if drafts were cut under load, acceptance would depend on other
requests. Prefill legs get all pages at admission and are never preempted: a transport may read pages that were declared
final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass

from baton.engine.request import Request, RequestStatus
from baton.kv.cache import KVCache
from baton.kv.interval import Interval
from baton.kv.tables import BlockTables, Destination


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Target rows [start, start + num_rows) of one request in one step."""

    request: Request
    start: int
    num_rows: int


class Scheduler:
    """Not thread-safe."""

    def __init__(self, cache: KVCache, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.receive_queue: deque[Request] = deque()
        self.announced: dict[Request, None] = {}  # not admitted by P yet
        self.receiving: set[Request] = set()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.receive_queue or self.announced)

    def queued(self) -> list[Request]:
        return [*self.waiting, *self.receive_queue, *self.announced]

    def enqueue(self, request: Request) -> None:
        """A decode leg that needs its handoff goes to `receive_queue`."""
        queue = self.receive_queue if request.role == "decode" and not request.started else self.waiting
        at = next((i for i, other in enumerate(queue) if other.queue_key > request.queue_key), len(queue))
        queue.insert(at, request)

    def schedule(self) -> list[ScheduledRows]:
        """Verifications first, then prefill chunks in order of arrival."""
        budget = self.max_num_batched_tokens
        scheduled: dict[Request, ScheduledRows] = {}
        for prefilling in (False, True):
            for request in list(self.running):
                if request.status is not RequestStatus.RUNNING or request.is_prefilling is not prefilling:
                    continue
                if prefilling:
                    num_rows = min(budget, request.prefill_len - request.num_computed)
                else:
                    num_rows = 1 + len(request.draft_ids)
                if num_rows == 0 or num_rows > budget:
                    continue
                if not self._reserve_or_preempt(request, num_rows, scheduled):
                    continue
                scheduled[request] = ScheduledRows(request, request.num_computed, num_rows)
                budget = self.max_num_batched_tokens - sum(rows.num_rows for rows in scheduled.values())
        while self.waiting and budget > 0 and self._num_active < self.max_num_seqs:
            request = self.waiting[0]
            # Neither queue overtakes the other, so neither starves.
            if self.receive_queue and self.receive_queue[0].queue_key < request.queue_key:
                break
            if not self._admit(request, budget):
                break
            self.waiting.popleft()
            num_rows = min(budget, request.prefill_len - request.num_computed)
            scheduled[request] = ScheduledRows(request, request.num_computed, num_rows)
            budget -= num_rows
        for rows in scheduled.values():
            if rows.request.is_prefilling:
                request, stop = rows.request, rows.start + rows.num_rows
                self.cache.plan_checkpoints(request.kv, request.token_ids, rows.start, stop)
        return list(scheduled.values())

    @property
    def _num_active(self) -> int:
        return len(self.running) + len(self.receiving)

    def _reserve_or_preempt(self, request: Request, num_rows: int, scheduled: dict[Request, ScheduledRows]) -> bool:
        while not self.cache.reserve(request.kv, request.num_computed + num_rows):
            victims = [other for other in reversed(self.running) if other.role != "prefill"]
            if not victims:
                return False
            victim = max(victims, key=lambda other: other.priority)  # of the worst priority, the last
            scheduled.pop(victim, None)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """The request recomputes later, before requests that have not started."""
        self.num_preemptions += 1
        self.running.remove(request)
        self.release(request)
        self._recompute_first(request)

    def recompute(self, request: Request) -> None:
        """A decode leg computes its prompt here, before requests that have not started."""
        self.remove(request)
        self._recompute_first(request)

    def _recompute_first(self, request: Request) -> None:
        request.set_prefill_length()
        request.transition(RequestStatus.WAITING)
        request.started = True
        self.enqueue(request)

    def release(self, request: Request) -> None:
        self.cache.release(request.kv)
        request.forget_computed()

    def quarantine(self, request: Request, wanted: Mapping[str, Interval]) -> BlockTables:
        """As `KVCache.quarantine`."""
        request.forget_computed()
        return self.cache.quarantine(request.kv, wanted)

    def _admit(self, request: Request, budget: int) -> bool:
        num_rows = request.prefill_len if request.role == "prefill" else budget
        hit = self.cache.attach(request.kv, request.token_ids, request.prefill_len, num_rows)
        if hit is None:
            return False
        request.num_computed = request.num_drafted = hit
        request.num_known_drafted = len(request.token_ids)
        if request.num_output == 0:
            request.num_cached = hit
        request.transition(RequestStatus.RUNNING)
        request.started = True
        self.running.append(request)
        return True

    def missing(self, request: Request) -> int:
        found = self.cache.find(request.kv, request.token_ids, request.prefill_len)
        return request.prefill_len - min(hit.num_tokens for hit in found.values())

    def start_receive(self, request: Request, sent_groups: Container[str] | None = None) -> Destination | None:
        """As `KVCache.attach_destination`. None: no room yet."""
        behind = bool(self.waiting) and self.waiting[0].queue_key < request.queue_key
        if self._num_active >= self.max_num_seqs or behind:
            return None
        destination = self.cache.attach_destination(request.kv, request.token_ids, request.prefill_len, sent_groups)
        if destination is not None:
            cold = [hit for name, hit in destination.hits.items() if name not in destination.wanted]
            request.draft_prefix_len = min(cold, default=None)
            request.num_cached = min(destination.hits.values())
            request.transition(RequestStatus.RECEIVING)
            request.started = True
            self.receiving.add(request)
        return destination

    def commit_receive(self, request: Request) -> None:
        """It runs from the next step on."""
        self.receiving.discard(request)
        request.transition(RequestStatus.RUNNING)
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """Its pages are not released."""
        if request in self.running:
            self.running.remove(request)
        for queue in (self.waiting, self.receive_queue):
            if request in queue:
                queue.remove(request)
        self.receiving.discard(request)
        self.announced.pop(request, None)
