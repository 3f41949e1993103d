"""Prepared byte strings for many connections. Making each one anew would take most of an attacker's time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """A connection's next action: send `data`, which holds `frames` frames, then wait for `wait` bytes of answers."""

    data: bytes = b""
    frames: int = 0
    wait: int = 0


# The steps of one connection. A step that waits is sent all bytes that the connection has heard.
Steps = Generator[Step, bytes | None, None]


class Pool:
    """Byte strings made by `make`, reproducible for the same `rng`. Each draw replaces one, so that the pool changes
    completely in every thousand connections.
    """

    def __init__(self, rng: random.Random, make: Callable[[], bytes]) -> None:
        self._rng, self._make = rng, make
        self._made = [make() for _ in range(_SIZE)]

    def draw(self, count: int) -> list[bytes]:
        self._made[self._rng.randrange(_SIZE)] = self._make()
        return self._rng.choices(self._made, k=count)


class Kinds:
    """Chooses a connection's kind by weight. `made`: the number of connections of each kind."""

    def __init__(self, rng: random.Random, weights: Mapping[str, float]) -> None:
        self._rng = rng
        self._names = list(weights)
        self._weights = list(weights.values())
        self.made: Counter[str] = Counter(dict.fromkeys(weights, 0))

    def choose(self) -> str:
        [name] = self._rng.choices(self._names, self._weights)
        self.made[name] += 1
        return name
