"""Continuous batching with chunked prefill under a token budget, and preemption by recompute.

A verification is scheduled whole or not at all: if drafts were cut under load, acceptance would depend on other
requests. Prefill legs are never preempted: a transport may read pages declared final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import islice

from baton.engine.prompt_budget import PromptBudget
from baton.engine.request import Request, RequestStatus
from baton.kv.block_tables import BlockTables, Destination
from baton.kv.cache import KVCache
from baton.kv.interval import Interval

# Waiting prompts searched for short ones while a long one runs.
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Target rows [start, start + num_rows) of one request."""

    request: Request
    start: int
    num_rows: int


class _Batch:
    """The rows scheduled so far for one step, in order. `limit`: the maximum."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num_rows = limit, 0
        self.rows: dict[Request, ScheduledRows] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self.rows

    @property
    def budget(self) -> int:
        return self.limit - self.num_rows

    def add(self, request: Request, num_rows: int) -> None:
        """Add rows after those that are computed or scheduled."""
        before = self.rows.get(request)
        if before is None:
            self.rows[request] = ScheduledRows(request, request.num_computed, num_rows)
        else:
            self.rows[request] = ScheduledRows(request, before.start, before.num_rows + num_rows)
        self.num_rows += num_rows

    def drop(self, request: Request) -> None:
        if (rows := self.rows.pop(request, None)) is not None:
            self.num_rows -= rows.num_rows

    def num_left(self, request: Request) -> int:
        """Prompt rows that are neither computed nor scheduled."""
        rows = self.rows.get(request)
        return request.prefill_len - (request.num_computed if rows is None else rows.start + rows.num_rows)


class Scheduler:
    """Chooses the rows of each step. Not thread-safe.

    `max_prefill_tokens`: prompt tokens of a step with decodes; None: what the budget leaves.
    """

    def __init__(
        self, cache: KVCache, max_num_batched_tokens: int, max_num_seqs: int, max_prefill_tokens: int | None = None
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.prompt_budget: PromptBudget | None = None  # in place of `max_prefill_tokens`
        self.waiting: deque[Request] = deque()  # by `queue_key`
        self.receive_queue: deque[Request] = deque()  # decode legs that need destination pages, by `queue_key`
        self.announced: dict[Request, None] = {}  # not admitted by P yet
        self.receiving: set[Request] = set()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.before_preemption: Callable[[Request], None] = lambda request: None

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

    # ------------------------------------------------------------ one step

    def schedule(self) -> list[ScheduledRows]:
        """The rows of the next step: verifications first, then prefill chunks in order of arrival.

        A prompt that does not fit is the *long* one: docs/router.md ("Queues") says what it leaves
        to others.
        """
        batch = _Batch(self.max_num_batched_tokens)
        for request in list(self.running):
            if request.status is RequestStatus.RUNNING and not request.is_prefilling:
                self._schedule(request, 1 + len(request.draft_ids), batch)
        most = self.max_prefill_tokens if self.prompt_budget is None else self.prompt_budget.num_tokens
        if batch.rows and most is not None:
            batch.limit = min(batch.limit, batch.num_rows + most)
        long = self._continue_prompts(batch)
        self._admit_waiting(batch, long is not None)
        if long is not None and long in batch:
            self._share(long, batch)
            self._extend(long, batch)
        for rows in batch.rows.values():
            request = rows.request
            if request.is_prefilling:
                self.cache.plan_checkpoints(request.kv, request.token_ids, rows.start, rows.start + rows.num_rows)
        return list(batch.rows.values())

    def _schedule(self, request: Request, num_rows: int, batch: _Batch) -> None:
        if 0 < num_rows <= batch.budget and self._reserve_or_preempt(request, num_rows, batch):
            batch.add(request, num_rows)

    def _continue_prompts(self, batch: _Batch) -> Request | None:
        """Returns the long prompt whose turn it is, if it got a part of the step."""
        prefilling = sorted((one for one in self.running if one.is_prefilling), key=lambda one: one.turn)
        long: Request | None = None
        if prefilling and self.waiting and self.waiting[0].turn < prefilling[0].turn:
            first = self.waiting[0]  # a shorter one has shared with one before it
            is_long = self.num_missing(first) > batch.budget
            if self._start(first, batch, batch.budget - (batch.budget // 2 if is_long else 0)) and is_long:
                long = first
        for request in prefilling:
            if request.status is not RequestStatus.RUNNING:
                continue  # it has just been preempted
            num_rows = batch.num_left(request)
            if num_rows > batch.budget:
                others = len(prefilling) > 1 or bool(self.waiting)
                num_rows = 0 if long is not None else batch.budget - (batch.budget // 2 if others else 0)
                long = long or request
            self._schedule(request, num_rows, batch)
        return long

    def _admit_waiting(self, batch: _Batch, only_short: bool) -> None:
        """Admit in order. `only_short`: a long prompt is computed, so others that do not fit are passed over."""
        most = _LOOKED_AT if only_short else max(self.max_num_seqs - self._num_active, 0)
        for request in list(islice(self.waiting, most)):
            if only_short and self.num_missing(request) > batch.budget:
                continue
            if not self._start(request, batch, batch.budget):
                break

    def _start(self, request: Request, batch: _Batch, budget: int) -> bool:
        """Admit a waiting request with at most `budget` rows. Returns False if it must wait."""
        if budget <= 0 or self._num_active >= self.max_num_seqs:
            return False
        # Neither queue overtakes the other, so neither starves.
        if self.receive_queue and self.receive_queue[0].queue_key < request.queue_key:
            return False
        if not self._admit(request, budget):
            return False
        self.waiting.remove(request)
        batch.add(request, min(budget, batch.num_left(request)))
        return True

    def _share(self, long: Request, batch: _Batch) -> None:
        """Give the rest of the step to the shortest other prompt of the long one's class, if it lacks less. Running
        prompts come first."""
        if batch.budget <= 0:
            return
        lacking = {
            request: batch.num_left(request)
            for request in self.running
            if request.is_prefilling and request not in batch
        } or {request: self.num_missing(request) for request in islice(self.waiting, _LOOKED_AT)}
        if not lacking:
            return
        other = min(lacking, key=lambda request: (request.priority, lacking[request]))
        if (other.priority, lacking[other]) >= (long.priority, batch.num_left(long)):
            return
        if other.status is RequestStatus.RUNNING:
            self._extend(other, batch)
        else:
            self._start(other, batch, batch.budget)

    def _extend(self, request: Request, batch: _Batch) -> None:
        """Give a prompt the rest of the step. Nobody is preempted."""
        more = min(batch.budget, batch.num_left(request))
        if more > 0 and self.cache.reserve(request.kv, request.prefill_len - batch.num_left(request) + more):
            batch.add(request, more)

    @property
    def has_room(self) -> bool:
        """Besides pages."""
        return self._num_active < self.max_num_seqs

    @property
    def _num_active(self) -> int:
        return len(self.running) + len(self.receiving)

    def _reserve_or_preempt(self, request: Request, num_rows: int, batch: _Batch) -> bool:
        while not self.cache.reserve(request.kv, request.num_computed + num_rows):
            victims = [other for other in reversed(self.running) if other.role != "prefill"]
            if not victims:
                return False
            victim = max(victims, key=lambda other: other.priority)  # of the worst priority, the last
            batch.drop(victim)
            self.preempt(victim)
            if victim is request:
                return False
        return True

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

    def num_missing(self, request: Request) -> int:
        """Prompt tokens of a waiting request that are not in the prefix cache."""
        hits = self.cache.find(request.kv, request.token_ids, request.prefill_len)
        return request.prefill_len - min(hit.num_tokens for hit in hits.values())

    # ------------------------------------------------------------ other transitions

    def preempt(self, request: Request) -> None:
        """The request recomputes later, before requests that have not started."""
        self.num_preemptions += 1
        self.before_preemption(request)
        self.running.remove(request)
        self.release(request)
        self._recompute_first(request)

    def recompute(self, request: Request) -> None:
        """Make a decode leg compute its prompt here, before requests that have not started."""
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
        request.forget_computed()
        return self.cache.quarantine(request.kv, wanted)

    def start_receive(self, request: Request, sent_groups: Container[str] | None = None) -> Destination | None:
        """See `KVCache.attach_destination`. None: no room yet."""
        is_behind = bool(self.waiting) and self.waiting[0].queue_key < request.queue_key
        if self._num_active >= self.max_num_seqs or is_behind:
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
        self.receiving.discard(request)
        request.transition(RequestStatus.RUNNING)
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """Remove from all queues, without releasing pages."""
        if request in self.running:
            self.running.remove(request)
        for queue in (self.waiting, self.receive_queue):
            if request in queue:
                queue.remove(request)
        self.receiving.discard(request)
        self.announced.pop(request, None)
