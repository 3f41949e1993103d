"""What a simulation shares: the event queue, the source of randomness, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from simulation.settings import Settings

# A longer schedule does not end: the largest of the first 100,000 seeds needs a tenth of it.
MAX_EVENTS = 60_000
_MAX_EVENTS_OF_RANKS = 240_000  # if engines have several ranks
# The share of seeds with `no_descriptor` in which calls other than dialling fail too, and that of such calls, which are
# many.
_SHARE_OF_SEEDS, _CALLS_SHARE = 0.25, 0.2


class Violation(Exception):
    """An invariant does not hold. `rule` is its short name."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class World:
    """Virtual time in seconds, the event queue, and the random generator."""

    def __init__(self, seed: int, settings: Settings, random: Random, tracing: bool = False) -> None:
        self.seed = seed
        self.settings = settings
        self.random = random
        self.now = 0.0
        self.events = 0
        self.progressed = 0.0  # when a request last progressed
        self.calm = False  # no more faults are injected
        self.injected: Counter[str] = Counter()
        self.violation: Violation | None = None
        self.tracing = tracing
        self.trace: list[str] = []
        self.computing: object | None = None  # the one process that is in a forward
        self.watch: Callable[[], None] | None = None  # called after each event
        # Of its own, so that no other draw depends on how often a call could have failed.
        self._shortages = Random(f"shortages of {seed}")
        self._all_calls_fail = self._shortages.random() < _SHARE_OF_SEEDS
        # In the other seeds an engine puts a request that begins again after all that wait.
        self.keeps_places = self._shortages.random() < _SHARE_OF_SEEDS
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    # ------------------------------------------------------------ time

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """`delay` is in virtual seconds."""
        self._count += 1
        heappush(self._queue, (self.now + delay, self._count, call, args))

    def step(self) -> bool:
        """Run the next event. Returns False if there is none."""
        if not self._queue:
            return False
        self.now, _, call, args = heappop(self._queue)
        self.events += 1
        most = _MAX_EVENTS_OF_RANKS if self.settings.num_heads > 1 else MAX_EVENTS
        if self.events > most:
            self.fail("endless", f"{most} events, and still not at rest")
        call(*args)
        if self.violation is not None:
            # It was raised inside a callback that catches its caller's exceptions.
            raise self.violation
        if self.watch is not None:
            self.watch()
        return True

    def run_for(self, seconds: float) -> None:
        """Run all events of the next `seconds`, from within an event."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.step()
        self.now = max(self.now, until)

    def skip(self, seconds: float) -> None:
        """Advance time while every process sleeps."""
        self.now += seconds

    # ------------------------------------------------------------ faults

    def hit(self, kind: str) -> bool:
        """Whether a fault of this kind occurs here; it is counted."""
        rate = self.settings.rates.get(kind, 0.0)
        if rate == 0.0 or self.calm or self.random.random() >= rate:
            return False
        self.injected[kind] += 1
        return True

    def short(self) -> bool:
        """Whether a call of the operating system fails now for want of descriptors or memory (`no_descriptor`)."""
        rate = self.settings.rates.get("no_descriptor", 0.0)
        if rate == 0.0 or self.calm or not self._all_calls_fail or self._shortages.random() >= rate * _CALLS_SHARE:
            return False
        self.injected["no_descriptor"] += 1
        return True

    def progress(self) -> None:
        """Some request progressed: it was admitted, computed or ended."""
        self.progressed = self.now

    # ------------------------------------------------------------ violations

    def fail(self, rule: str, message: str) -> None:
        """Raises `Violation`."""
        if self.violation is None:
            self.violation = Violation(rule, message)
        self.note("!", f"VIOLATION {self.violation}")
        raise self.violation

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace. Callers on hot paths check `tracing` first."""
        if self.tracing:
            self.trace.append(f"{self.now:10.4f} {who:<6} {what}")
