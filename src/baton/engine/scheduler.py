"""Continuous batching with chunked prefill under a token budget, and preemption by recompute.

A verification is scheduled whole or not at all: if drafts were cut under load, acceptance would depend on other
requests. Prefill legs get all pages at admission and are never preempted: a transport may read pages declared final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import islice

from baton.engine.request import Request, RequestStatus
from baton.kv.block_tables import BlockTables, Destination
from baton.kv.cache import KVCache
from baton.kv.interval import Interval

# How many waiting prompts are looked at for short ones, beside a long one.
_LOOKED_AT = 64
# Tokens of smaller chunks cost more.
_LEAST_CHUNK = 32
# Before anything was measured.
_FIRST_CHUNK = 256
# Longer times may be another process's fault.
_RISE = 1.5


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Target rows [start, start + num_rows) of one request in one step."""

    request: Request
    start: int
    num_rows: int


class PromptBudget:
    """Prompt tokens of a step beside decodes: for `bound_s`, or twice the decodes' time. `most`: None: any."""

    def __init__(self, bound_s: float, most: int | None = None) -> None:
        self._bound_s, self._most = bound_s, most
        self._decode_s = self._token_s = 0.0

    def computed(self, num_prompt_tokens: int, decodes: bool, seconds: float) -> None:
        """Note the time of a step. `decodes`: it decoded too."""
        if num_prompt_tokens == 0:
            self._decode_s = _nearer(self._decode_s, seconds)
        elif num_prompt_tokens >= _LEAST_CHUNK or not self._token_s:
            prompt_s = max(seconds - self._decode_s, seconds / 4) if decodes else seconds
            self._token_s = _nearer(self._token_s, prompt_s / num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        found = _FIRST_CHUNK
        if self._token_s:
            seconds = max(self._bound_s - self._decode_s, self._decode_s)
            found = max(int(seconds / self._token_s) // _LEAST_CHUNK, 1) * _LEAST_CHUNK
        return found if self._most is None else min(found, self._most)


def _nearer(old: float, new: float) -> float:
    return min(new, _RISE * old) if old else new


class Scheduler:
    """Not thread-safe.

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
        self._limit = max_num_batched_tokens  # of this step
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
        """The rows of the next step: verifications first, then prefill chunks in order of arrival. A prompt that does
        not fit into the step leaves half of it to later ones that do, also to those that wait, then to one that lacks
        less than itself, and gets what they leave. Others wait for their turn."""
        scheduled: dict[Request, ScheduledRows] = {}
        self._limit = self.max_num_batched_tokens
        for request in list(self.running):
            if request.status is RequestStatus.RUNNING and not request.is_prefilling:
                self._schedule(request, 1 + len(request.draft_ids), scheduled)
        most = self.max_prefill_tokens if self.prompt_budget is None else self.prompt_budget.num_tokens
        if scheduled and most is not None:
            num_decoded = self.max_num_batched_tokens - self._budget(scheduled)
            self._limit = min(self._limit, num_decoded + most)
        long = self._continue_prompts(scheduled)
        self._admit_waiting(scheduled, long is not None)
        if long is not None and long in scheduled:
            self._share(scheduled[long], scheduled)
            self._extend(scheduled[long], scheduled)
        for rows in scheduled.values():
            if rows.request.is_prefilling:
                request, stop = rows.request, rows.start + rows.num_rows
                self.cache.plan_checkpoints(request.kv, request.token_ids, rows.start, stop)
        return list(scheduled.values())

    def _budget(self, scheduled: Mapping[Request, ScheduledRows]) -> int:
        return self._limit - sum(rows.num_rows for rows in scheduled.values())

    def _schedule(self, request: Request, num_rows: int, scheduled: dict[Request, ScheduledRows]) -> None:
        """Schedule rows of a running request if there is room for them."""
        if 0 < num_rows <= self._budget(scheduled) and self._reserve_or_preempt(request, num_rows, scheduled):
            scheduled[request] = ScheduledRows(request, request.num_computed, num_rows)

    def _continue_prompts(self, scheduled: dict[Request, ScheduledRows]) -> Request | None:
        """Schedule the prompts that are being computed. Returns the long one that has got a part of the step: of all,
        the one whose turn it is."""
        prefilling = sorted((one for one in self.running if one.is_prefilling), key=lambda one: one.turn)
        long: Request | None = None
        if prefilling and self.waiting and self.waiting[0].turn < prefilling[0].turn:
            first, budget = self.waiting[0], self._budget(scheduled)  # a shorter one has shared with one before it
            if self._start(first, scheduled, budget - budget // 2) and self._lacking(first, scheduled):
                long = first
        for request in prefilling:
            if request.status is not RequestStatus.RUNNING:
                continue  # it has just been preempted
            num_rows, budget = request.prefill_len - request.num_computed, self._budget(scheduled)
            if num_rows > budget:
                others = len(prefilling) > 1 or bool(self.waiting)
                num_rows = 0 if long is not None else budget - (budget // 2 if others else 0)
                long = long or request
            self._schedule(request, num_rows, scheduled)
        return long

    def _admit_waiting(self, scheduled: dict[Request, ScheduledRows], only_short: bool) -> None:
        """Admit in order. `only_short`: a long prompt is being computed, so others that do not fit are passed over."""
        most = _LOOKED_AT if only_short else max(self.max_num_seqs - self._num_active, 0)
        for request in list(islice(self.waiting, most)):
            if only_short and self.missing(request) > self._budget(scheduled):
                continue
            if not self._start(request, scheduled, self._budget(scheduled)):
                break

    def _start(self, request: Request, scheduled: dict[Request, ScheduledRows], budget: int) -> bool:
        """Admit a waiting request with at most `budget` rows. Returns False if it must wait."""
        if budget <= 0 or self._num_active >= self.max_num_seqs:
            return False
        # Neither queue overtakes the other, so neither starves.
        if self.receive_queue and self.receive_queue[0].queue_key < request.queue_key:
            return False
        if not self._admit(request, budget):
            return False
        self.waiting.remove(request)
        num_rows = min(budget, request.prefill_len - request.num_computed)
        scheduled[request] = ScheduledRows(request, request.num_computed, num_rows)
        return True

    def _share(self, long: ScheduledRows, scheduled: dict[Request, ScheduledRows]) -> None:
        """Give what is left of the step to one other prompt of the long one's class, the shortest, if it lacks less.
        One that is being computed already comes first."""
        if self._budget(scheduled) <= 0:
            return
        lacking = {
            request: request.prefill_len - request.num_computed
            for request in self.running
            if request.is_prefilling and request not in scheduled
        } or {request: self.missing(request) for request in islice(self.waiting, _LOOKED_AT)}
        if not lacking:
            return
        other = min(lacking, key=lambda request: (request.priority, lacking[request]))
        left = self._lacking(long.request, scheduled)
        if (other.priority, lacking[other]) >= (long.request.priority, left):
            return
        if other.status is RequestStatus.RUNNING:
            num_rows = min(self._budget(scheduled), lacking[other])
            if self.cache.reserve(other.kv, other.num_computed + num_rows):  # nobody is preempted for it
                scheduled[other] = ScheduledRows(other, other.num_computed, num_rows)
        else:
            self._start(other, scheduled, self._budget(scheduled))

    def _lacking(self, request: Request, scheduled: Mapping[Request, ScheduledRows]) -> int:
        """How many rows of a prompt the next steps must compute."""
        return request.prefill_len - scheduled[request].start - scheduled[request].num_rows

    def _extend(self, rows: ScheduledRows, scheduled: dict[Request, ScheduledRows]) -> None:
        """Give a prompt what is left of the step, if there are pages for it."""
        request, stop = rows.request, rows.start + rows.num_rows
        more = min(self._budget(scheduled), request.prefill_len - stop)
        if more > 0 and self.cache.reserve(request.kv, stop + more):
            scheduled[request] = ScheduledRows(request, rows.start, rows.num_rows + more)

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
