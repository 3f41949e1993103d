"""Continuous batching with chunked prefill under a token budget, and preemption by recompute.

A verification (last token and its drafts) is scheduled whole or not at all: cutting drafts under load would
make acceptance depend on the neighbours. Prefill legs get all their pages at admission and are never
preempted, because a transport may read pages that were declared final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.engine.request import Request, RequestStatus
from baton.errors import CapacityError
from baton.kv.interval import Rules
from baton.kv.pool import PagePool

CopyPage = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Target rows [start, start + num_rows) of one request in one step."""

    request: Request
    start: int
    num_rows: int


class Scheduler:
    """Owns the queues and the page pools (one per group). Single-threaded; mutates requests' pages and status.

    `rules` are those of each group. `copy_page(group, source, destination)`
    copies the bytes of one page (copy-on-write of a partly shared page).
    """

    def __init__(
        self,
        pools: Mapping[str, PagePool],
        rules: Mapping[str, Rules],
        num_lookahead_slots: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        copy_page: CopyPage,
    ) -> None:
        self.pools = pools
        self.rules = rules
        self.num_lookahead_slots = num_lookahead_slots
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.copy_page = copy_page
        self.waiting: deque[Request] = deque()
        self.receive_queue: deque[Request] = deque()
        self.announced: dict[Request, None] = {}  # decode legs that the prefill side has no room for yet
        self.receiving: set[Request] = set()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.receive_queue or self.announced)

    def queued(self) -> list[Request]:
        """Requests that have no pages."""
        return [*self.waiting, *self.receive_queue, *self.announced]

    def enqueue(self, request: Request) -> None:
        """Put a request where it belongs: among those that compute here, or among the decode legs."""
        queue = self.receive_queue if request.role == "decode" and not request.started else self.waiting
        at = next((i for i, other in enumerate(queue) if other.place > request.place), len(queue))
        queue.insert(at, request)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of that many tokens could ever run here alone."""
        slots = num_tokens + self.num_lookahead_slots
        return all(
            self.rules[name].num_pages(slots, pool.page_size) <= pool.num_pages - 1 for name, pool in self.pools.items()
        )

    def schedule(self) -> list[ScheduledRows]:
        """Rows of the next step, decodes first, then prefill chunks in order of arrival."""
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
            # Neither queue overtakes the other, lest one of them waits for ever.
            if self.receive_queue and self.receive_queue[0].place < request.place:
                break
            if not self._admit(request, budget):
                break
            self.waiting.popleft()
            num_rows = min(budget, request.prefill_len - request.num_computed)
            scheduled[request] = ScheduledRows(request, request.num_computed, num_rows)
            budget -= num_rows
        return list(scheduled.values())

    @property
    def _num_active(self) -> int:
        return len(self.running) + len(self.receiving)

    def _reserve_or_preempt(self, request: Request, num_rows: int, scheduled: dict[Request, ScheduledRows]) -> bool:
        while not self._reserve(request, request.num_computed + num_rows + self.num_lookahead_slots):
            victim = next((r for r in reversed(self.running) if r.role != "prefill"), None)
            if victim is None:
                return False
            scheduled.pop(victim, None)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _reserve(self, request: Request, num_slots: int) -> bool:
        """Extend every group's block table to `num_slots` token slots; all groups or none."""
        wanted: dict[str, int] = {}
        for name, pool in self.pools.items():
            missing = self.rules[name].num_pages(num_slots, pool.page_size) - len(request.pages.get(name, ()))
            if missing > pool.num_available:
                return False
            wanted[name] = missing
        for name, missing in wanted.items():
            if missing > 0:
                pages = request.pages.get(name, [])
                grown = pages + self.pools[name].allocate(missing, pages[-1] if pages else None)
                request.set_pages(name, grown)
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it recomputes later, before anything that waits."""
        self.num_preemptions += 1
        self.running.remove(request)
        self.release(request)
        self._recompute_first(request)

    def recompute(self, request: Request) -> None:
        """A decode leg that has given up its pages, or has had none, computes its prompt itself, before anything that
        has not started."""
        self.remove(request)
        self._recompute_first(request)

    def _recompute_first(self, request: Request) -> None:
        request.set_prefill_length()
        request.status, request.started = RequestStatus.WAITING, True
        self.enqueue(request)

    def release(self, request: Request) -> None:
        """Drop the request's references to its pages."""
        for name, ids in request.drop_pages().items():
            self.pools[name].release(ids)

    def quarantine(self, request: Request, first_wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Drop the request's references; pages from that of token `first_wanted[group]` on, which a peer may still
        write, stay out of use. Returns those, as block tables in which all others are null."""
        held: dict[str, list[int]] = {}
        for name, ids in request.drop_pages().items():
            pool = self.pools[name]
            num_shared = first_wanted[name] // pool.page_size
            pool.release(ids[num_shared:], quarantine=True)
            pool.release(ids[:num_shared])
            held[name] = [0] * num_shared + ids[num_shared:]
        return held

    def _admit(self, request: Request, budget: int) -> bool:
        # One row at least is computed: it yields the logits, or the features that the drafter starts from.
        hit = min(self._attach_prefix(request, self._common_hit(request)).values())
        whole = request.role == "prefill"
        num_rows = request.prefill_len - hit if whole else min(budget, request.prefill_len - hit)
        if not self._reserve(request, hit + num_rows + self.num_lookahead_slots):
            self.release(request)
            return False
        request.num_computed = request.num_drafted = hit
        if request.num_output == 0:
            request.num_cached = hit
        request.status, request.started = RequestStatus.RUNNING, True
        self.running.append(request)
        return True

    def _common_hit(self, request: Request) -> dict[str, int]:
        limit = request.prefill_len - 1
        tokens, digests = request.token_ids, request.digests
        common = min(pool.lookup(tokens, limit, digests[name]).num_tokens for name, pool in self.pools.items())
        return dict.fromkeys(self.pools, common)

    def receive_hits(self, request: Request) -> dict[str, int]:
        """Prefix hits of a decode leg, per group: it computes nothing, so they need not agree, and the target's may be
        all of it. The drafter's last entry depends on the first token to decode from and always moves."""
        num = request.prefill_len
        tokens = request.token_ids[:num]
        return {
            name: self.rules[name].hit(pool.lookup(tokens, num, request.digests[name]).num_tokens, num)
            for name, pool in self.pools.items()
        }

    def _attach_prefix(self, request: Request, hits: Mapping[str, int]) -> dict[str, int]:
        """Share the cached pages of each group's hit; a partly shared page is copied. Returns the hits attached.

        When no page is left for a copy, the hit shrinks to whole pages.
        """
        attached = dict(hits)
        for name, pool in self.pools.items():
            found = pool.lookup(request.token_ids, hits[name], request.digests[name])
            num = min(found.num_tokens, hits[name])
            whole, rest = divmod(num, pool.page_size)
            pages = found.pages[:whole]
            pool.share(pages)
            if rest:
                source = found.pages[whole]
                pool.share([source])
                try:
                    copy = pool.allocate(1, pages[-1] if pages else None)
                except CapacityError:
                    num = whole * pool.page_size
                else:
                    self.copy_page(name, source, copy[0])
                    pages = pages + copy
                pool.release([source])
            request.set_pages(name, pages)
            attached[name] = num
        return attached

    def start_receive(self, request: Request) -> dict[str, int] | None:
        """Give a decode leg its destination pages. Returns the hit per group, or None when there is no room yet."""
        behind = bool(self.waiting) and self.waiting[0].place < request.place
        if self._num_active >= self.max_num_seqs or behind:
            return None
        hits = self._attach_prefix(request, self.receive_hits(request))
        if not self._reserve(request, request.prefill_len + 1 + self.num_lookahead_slots):
            self.release(request)
            return None
        request.status, request.started = RequestStatus.RECEIVING, True
        self.receiving.add(request)
        return hits

    def drop_outside_window(self, request: Request, group: str, first_wanted: int) -> None:
        """Null the pages of a sliding-window group that lie wholly before its first wanted token.

        What is left of the group is no whole prefix, so none of it enters the prefix cache.
        """
        pages = list(request.pages[group])
        outside = first_wanted // self.pools[group].page_size
        self.pools[group].release(pages[:outside])
        request.set_pages(group, [0] * outside + pages[outside:])
        request.uncached_groups.add(group)

    def commit_receive(self, request: Request) -> None:
        """All groups are committed: the request decodes from the next step on."""
        self.receiving.discard(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out of every queue; its pages are untouched."""
        if request in self.running:
            self.running.remove(request)
        for queue in (self.waiting, self.receive_queue):
            if request in queue:
                queue.remove(request)
        self.receiving.discard(request)
        self.announced.pop(request, None)
