"""Legs that move cached KV between prefix caches of two engines, and compute nothing.

For the protocol these are handoffs (docs/protocol.md, "Prefixes"). The source has everything at once, so its agent
never waits for its engine.
"""

from __future__ import annotations

from baton.engine.legs.leg import Effect, Leg, PrefixArrived, RequestFailed
from baton.engine.metrics import EngineMetrics
from baton.engine.request import Request, RequestStatus
from baton.handoff.agent.leg_events import Agent
from baton.handoff.protocol.events import Declared, DecodeCommitted, DecodeFinished, Sampled
from baton.handoff.protocol.messages import Seeds
from baton.kv.cache import KVCache
from baton.kv.moved_prefix import SharedPrefix, attach_prefix, enter_prefix, share_prefix


class PrefixLegs:
    """Used on the engine thread only."""

    def __init__(self, agent: Agent, cache: KVCache) -> None:
        self._agent, self._cache = agent, cache

    def hold(self, request: Request) -> bool:
        """Source: share the pages of the prompt's cached prefix, and set `prefix_len` to its length, and
        `window_start`. Returns False if none, or if more than `max_prefill_tokens` are missing.
        """
        assert request.prefix_len is not None
        most, multiple = request.prefix_len, request.prefix_multiple
        shared = share_prefix(self._cache, request.kv, request.token_ids, most, multiple)
        num_tokens = shared.num_tokens
        lacking, limit = request.num_prompt - num_tokens, request.max_prefill_tokens
        if not num_tokens or (limit is not None and lacking > limit):
            self._cache.release(request.kv)
            return False
        request.prefix_len = request.prefill_len = num_tokens
        request.window_start = shared.window_start
        return True

    def offer(self, request: Request) -> None:
        """Source: open the leg; the whole prefix is final, and the agent does the rest."""
        assert request.ticket is not None
        assert request.prefix_len is not None
        key, num_tokens, cache = request.ticket.key, request.prefix_len, self._cache
        final = {name: 1 if rules.kind == "state" else num_tokens for name, rules in cache.rules.items()}
        tables = {group: list(table) for group, table in request.kv.pages.items()}
        request.transition(RequestStatus.AWAITING_RELEASE)
        self._agent.open_prefill(request.ticket)
        self._agent.admit_prefill(key)
        self._agent.post(key, Declared(num_tokens, tables, final))
        self._agent.post(key, Sampled(self._seeds(request), False, final))

    def _seeds(self, request: Request) -> Seeds:
        assert request.prefix_len is not None
        return Seeds(request.token_ids[request.prefix_len], None, [], b"")

    def place(self, leg: Leg) -> list[Effect]:
        """Destination: the source can send, so register pages for missing tokens, or give up."""
        request, ticket = leg.request, leg.request.ticket
        if request.status is not RequestStatus.WAITING:
            return []  # it was aborted
        assert ticket is not None
        assert request.prefix_len is not None
        if leg.sent_groups is not None and not leg.sent_groups >= set(self._cache.pools):
            return [RequestFailed(request, "prefix_refused: the source does not send the KV of all groups")]
        prefix = SharedPrefix(request.prefix_len, request.window_start)
        destination = attach_prefix(self._cache, request.kv, request.token_ids, prefix)
        if destination is None:
            why = "no pages are free, it ends at no checkpoint, or a window begins too late"
            return [RequestFailed(request, f"prefix_refused: {why}")]
        request.prefill_len = request.prefix_len
        request.transition(RequestStatus.RECEIVING)
        leg.wanted = destination.wanted
        pages = {name: request.kv.pages[name] for name in leg.wanted}
        self._agent.open_decode(ticket, request.prefix_len, leg.wanted, pages)
        return []

    def take(self, leg: Leg, event: DecodeCommitted | DecodeFinished, metrics: EngineMetrics) -> list[Effect]:
        """Destination: after a commit the bytes are in place and proven, and become cached pages. No honest source
        sends the end of a request.
        """
        request = leg.request
        assert request.prefix_len is not None
        if isinstance(event, DecodeFinished) or event.seeds != self._seeds(request):
            metrics.handoff_failures["bad_seeds"] += 1
            return [RequestFailed(request, "bad_seeds: they are not those of the prompt")]
        num_tokens = enter_prefix(self._cache, request.kv, request.token_ids, request.prefix_len)
        metrics.num_received_prefixes += 1
        metrics.received_prefix_bytes += event.num_bytes
        return [PrefixArrived(request, num_tokens)]
