"""Streaming by layer: during a forward, the agent is told of each prompt's layers that are written already, and copies
them while later layers are computed. Runs on the engine thread, in the midst of `Executor.execute`.

A message costs the agent and the interpreter about as much as a copy of `MIN_BYTES`, so layers are gathered until so
much is new, and a chunk that is smaller goes as a whole when its step ends. States are final with a step, as are the
entries of drafters, which run behind the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.plan import Written
from baton.engine.request import Request
from baton.engine.scheduler import ScheduledRows
from baton.handoff.node.instance import Agent
from baton.handoff.protocol.events import LayersWithdrawn, LayersWritten
from baton.kv.cache import KVCache
from baton.kv.spec import GroupSpec

MIN_BYTES = 1 << 20


@dataclass(slots=True)
class _Streamed:
    """A prompt in the forward: the layers below `stop` were told, those from there on hold `untold` bytes in
    `groups`."""

    request: Request
    num_rows: int
    pages: dict[str, list[int]]
    final: dict[str, int]
    stop: int = 0
    untold: int = 0
    groups: set[str] = field(default_factory=set)


class LayerStream:
    """What of the forward under way was told. `groups` are all of the engine's, over its ranks. With `many_ranks` a
    layer counts as written when the next one is: behind the sum that all ranks made in between, each has written it.
    `min_bytes` is `MIN_BYTES` where it is not given."""

    def __init__(
        self,
        agent: Agent,
        cache: KVCache,
        groups: Sequence[GroupSpec],
        many_ranks: bool,
        min_bytes: int | None = None,
    ) -> None:
        self._agent, self._cache, self._behind = agent, cache, int(many_ranks)
        self._min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        self._group_of: dict[int, tuple[str, int]] = {}  # by layer: its group, and its bytes of one token
        for group in groups:
            if group.owner == "target" and group.kind != "state":
                token_bytes = sum(plane.token_bytes for plane in group.planes)
                self._group_of |= dict.fromkeys(group.layer_ids, (group.name, token_bytes))
        self._names = {name for name, _ in self._group_of.values()}
        self._token_bytes = sum(token_bytes for _, token_bytes in self._group_of.values())
        self._streamed: list[_Streamed] = []
        self._last = -1

    def begin(self, scheduled: Sequence[ScheduledRows]) -> Written | None:
        """What a forward over these rows is to call for each layer; None where there is nothing to gain."""
        self._streamed, self._last = [], -1
        for rows in scheduled:
            request = rows.request
            ticket = request.ticket
            if request.role != "prefill" or ticket is None or ticket.mode != "push" or not request.is_prefilling:
                continue
            if rows.num_rows * self._token_bytes < 2 * self._min_bytes:
                continue
            n, computed = request.prefill_len, rows.start + rows.num_rows
            final = {name: self._cache.num_final(name, n, computed, 0) for name in self._names}
            pages = self._cache.offered(request.kv, n)
            self._streamed.append(_Streamed(request, rows.num_rows, pages, final))
        return self._written if self._streamed else None

    def _written(self, layer_id: int) -> None:
        done, self._last = (self._last, layer_id) if self._behind else (layer_id, layer_id)
        if done not in self._group_of:
            return
        group, token_bytes = self._group_of[done]
        for one in self._streamed:
            one.untold += one.num_rows * token_bytes
            one.groups.add(group)
            if one.untold >= self._min_bytes:
                self._tell(one, done + 1)

    def _tell(self, one: _Streamed, stop: int) -> None:
        assert one.request.ticket is not None
        final = {name: one.final[name] for name in sorted(one.groups)}
        tables = {name: list(one.pages[name]) for name in final}
        event = LayersWritten(one.request.prefill_len, tables, final, stop)
        self._agent.stream_layers(one.request.ticket.key, event)
        one.stop, one.untold, one.groups = stop, 0, set()

    def withdraw(self) -> None:
        """The forward has failed, and its rows will be computed again or never."""
        for one in self._streamed:
            if one.stop:
                assert one.request.ticket is not None
                self._agent.stream_layers(one.request.ticket.key, LayersWithdrawn())
        self._streamed = []
