"""Waiting requests in scheduling order (docs/router.md, "Queues").

Tenants share by virtual token counters (Y. Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.errors import OverloadedError
from baton.openai.http.waiting import QueueSpeed
from baton.router.admission.tenants import ANY, Standing, Tenant, tenant_of

T = TypeVar("T")
# Tenants remembered after their last request, since names may come from clients.
_REMEMBERED = 1024


@dataclass(slots=True)
class _State(Generic[T]):
    """`served`: tokens over weight. `waiting`: by priority, deadline and arrival."""

    tenant: Tenant
    served: float = 0.0
    num_running: int = 0
    num_tokens: int = 0
    waiting: list[tuple[int, float, int, T]] = field(default_factory=list)
    speed: QueueSpeed = field(default_factory=QueueSpeed)

    @property
    def has_room(self) -> bool:
        limit = self.tenant.max_running
        return limit is None or self.num_running < limit

    @property
    def may_run(self) -> bool:
        return bool(self.waiting) and self.has_room

    def charge(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.served += num_tokens / self.tenant.weight


class FairQueue(Generic[T]):
    """Items must be hashable."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants
        self._states: dict[str, _State[T]] = {}
        self._entries: dict[T, tuple[Standing, tuple[int, float, int, T]]] = {}
        self._num_pushed = 0
        self._num_tokens: Counter[str] = Counter()  # of forgotten tenants
        self._level = 0.0  # virtual time: the level of the last tenant that waited

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: T, standing: Standing, now: float) -> None:
        """A tenant gets no credit for the time when it did not wait."""
        state = self._state(standing.tenant)
        if not state.waiting:
            others = [other.served for other in self._states.values() if other.waiting]
            state.served = max(state.served, min(others, default=self._level))
            state.speed.resume(now)
        self._num_pushed += 1
        entry = (standing.priority, standing.deadline, self._num_pushed, item)
        insort(state.waiting, entry, key=lambda entry: entry[:3])
        self._entries[item] = standing, entry

    def start(self, standing: Standing, now: float) -> bool:
        """Begin a request at once. False, without changes, if others wait or its tenant has no room."""
        if self._entries:
            return False
        state = self._state(standing.tenant)
        if not state.has_room:
            return False
        state.served = max(state.served, self._level)
        state.speed.resume(now)
        self._begin(state, standing.prompt_tokens, now)
        return True

    def next(self) -> T | None:
        """None if no item may run."""
        best = self._best()
        return None if best is None else best.waiting[0][3]

    def take(self, now: float) -> T | None:
        """Charges its prompt. None if no item may run."""
        best = self._best()
        if best is None:
            return None
        item = best.waiting.pop(0)[3]
        standing, _ = self._entries.pop(item)
        self._begin(best, standing.prompt_tokens, now)
        return item

    def _begin(self, state: _State[T], prompt_tokens: int, now: float) -> None:
        self._level = state.served
        state.charge(prompt_tokens)
        state.num_running += 1
        state.speed.note(now)

    def _best(self) -> _State[T] | None:
        ready = [state for state in self._states.values() if state.may_run]
        if len(ready) < 2:
            return ready[0] if ready else None
        # Equal tenants take turns by their oldest request.
        return min(ready, key=lambda state: (state.waiting[0][0], state.served, state.waiting[0][1:3]), default=None)

    def remove(self, item: T) -> None:
        standing, entry = self._entries.pop(item)
        self._states[standing.tenant].waiting.remove(entry)
        self._forget()

    def charge(self, name: str, num_tokens: int) -> None:
        self._state(name).charge(num_tokens)

    def end(self, name: str) -> None:
        self._states[name].num_running -= 1
        self._forget()

    def _forget(self) -> None:
        if len(self._states) <= _REMEMBERED:
            return
        idle = [other for other, state in self._states.items() if not (state.waiting or state.num_running)]
        for other in idle[: len(self._states) - _REMEMBERED]:
            self._num_tokens[self._counted(other)] += self._states.pop(other).num_tokens

    def check(self, name: str, now: float) -> None:
        """Raises `OverloadedError`."""
        state = self._state(name)
        most, num_waiting = state.tenant.max_queued, len(state.waiting)
        if most is not None and num_waiting > most:
            text = f"{num_waiting - 1} requests of this tenant wait already; try again later"
            raise OverloadedError(text, state.speed.seconds_for(num_waiting, now))

    def counts(self) -> Iterator[tuple[str, int, int, int]]:
        """`(tenant, waiting, running, tokens)` of the configured tenants. All others count as one."""
        sums = {name: [0, 0, self._num_tokens[name]] for name in [*self._tenants, ANY]}
        for name, state in self._states.items():
            total = sums[self._counted(name)]
            for place, value in enumerate((len(state.waiting), state.num_running, state.num_tokens)):
                total[place] += value
        for name, (waiting, running, tokens) in sums.items():
            yield name, waiting, running, tokens

    def _counted(self, name: str) -> str:
        return name if name in self._tenants else ANY

    def _state(self, name: str) -> _State[T]:
        if name not in self._states:
            self._states[name] = _State(tenant_of(name, self._tenants))
        return self._states[name]
