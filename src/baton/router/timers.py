"""The router's timers, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterTimers:
    """Durations in seconds. An engine's answer renews its lease; all of these are on the router's own clock.

    `check`: between two questions to an engine. `answer`: an engine that takes longer gets new requests only for want
    of another. `lease`: an engine silent for so long loses its legs to others. `patience`: a request that has begun
    waits for so long for an engine that can go on with it. `connect`: for a leg's connection. `tell`: for a vLLM
    server's answer to a question or a message, which costs it one token. `drain`: a leg whose request is over is read
    for so long, so that it ends by itself.
    """

    check: float = 0.5
    answer: float = 1.0
    lease: float = 5.0
    patience: float = 5.0
    connect: float = 3.0
    tell: float = 20.0
    drain: float = 5.0
