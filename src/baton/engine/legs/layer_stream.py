"""KV streaming within a forward: the agent copies written layers while later ones and the LM head run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.scheduler import ScheduledRows
from baton.engine.step_plans import Written
from baton.handoff.agent.layers import WrittenLayers
from baton.handoff.agent.leg_events import Agent
from baton.kv.cache import KVCache
from baton.kv.spec import GroupSpec

# The agent's work for a report slows the forward, so a long chunk has few.
_MOST_REPORTS = 8


class StreamLimits(NamedTuple):
    """`few_rows`: a forward of at most so many reports none."""

    min_bytes: int
    few_rows: int


LIMITS = StreamLimits(min_bytes=1 << 20, few_rows=64)


class _Streamed(NamedTuple):
    """A prompt's rows in the forward, after `start` of its tokens. `least`: bytes of a report."""

    rows: range
    start: int
    least: int
    layers: WrittenLayers


class LayerStream:
    """`groups`: over all ranks. Without `by_layer`: of a last chunk each block of rows, and its last layer alone.

    With `many_ranks` a layer counts as written when the next one is: in between, the ranks compute a sum.
    """

    def __init__(
        self,
        agent: Agent,
        cache: KVCache,
        groups: Sequence[GroupSpec],
        many_ranks: bool,
        by_layer: bool,
        limits: StreamLimits | None = None,
    ) -> None:
        self._agent, self._cache, self._behind, self._by_layer = agent, cache, int(many_ranks), by_layer
        self._min_bytes, self._few_rows = limits or LIMITS
        self._groups_of: dict[int, list[tuple[str, int]]] = {}  # by layer: its groups, and bytes per token
        for group in groups:
            if group.owner == "target" and group.kind != "state":
                token_bytes = sum(plane.token_bytes for plane in group.planes)
                for layer_id in group.layer_ids:
                    self._groups_of.setdefault(layer_id, []).append((group.name, token_bytes))
        kept = [group for of_layer in self._groups_of.values() for group in of_layer]
        self._names = {name for name, _ in kept}
        self._token_bytes = sum(token_bytes for _, token_bytes in kept)
        self._streamed: list[_Streamed] = []
        self._last = -1
        self._report_from = max(self._groups_of, default=-1) - (not by_layer)

    def begin(self, scheduled: Sequence[ScheduledRows]) -> Written | None:
        """None if streaming gains nothing."""
        self._streamed, self._last = [], -1
        if sum(rows.num_rows for rows in scheduled) <= self._few_rows:
            return None
        first = 0
        for rows in scheduled:
            forwarded = range(first, first + rows.num_rows)
            first = forwarded.stop
            request = rows.request
            ticket = request.ticket
            if request.role != "prefill" or ticket is None or ticket.mode != "push" or not request.is_prefilling:
                continue
            num_bytes = rows.num_rows * self._token_bytes
            n, computed = request.prefill_len, rows.start + rows.num_rows
            if num_bytes < self._min_bytes or not (self._by_layer or computed == n):
                continue
            final, pages = self._final(n, computed), self._cache.offered(request.kv, n)
            least = max(self._min_bytes, num_bytes // _MOST_REPORTS) if self._by_layer else num_bytes
            layers = WrittenLayers(self._agent, ticket.key, n, pages, final)
            self._streamed.append(_Streamed(forwarded, rows.start, least, layers))
        return Written(self._written, self._rows_written, self._by_layer) if self._streamed else None

    def _written(self, layer_id: int) -> None:
        done, self._last = (self._last, layer_id) if self._behind else (layer_id, layer_id)
        if done not in self._groups_of:
            return
        for one in self._streamed:
            for group, token_bytes in self._groups_of[done]:
                one.layers.add(group, len(one.rows) * token_bytes)
            if one.layers.unreported >= one.least or layer_id >= self._report_from:
                one.layers.report(done + 1)

    def _rows_written(self, num_rows: int) -> None:
        if self._behind:
            return
        for one in self._streamed:
            computed = min(num_rows, one.rows.stop) - one.rows.start
            if computed > 0:
                final = self._final(one.layers.num_tokens, one.start + computed)
                one.layers.report_tokens(final, max(self._groups_of) + 1)

    def _final(self, num_known: int, num_computed: int) -> dict[str, int]:
        return {name: self._cache.num_final(name, num_known, num_computed, 0) for name in self._names}

    def withdraw(self) -> None:
        for one in self._streamed:
            one.layers.withdraw()
        self._streamed = []
