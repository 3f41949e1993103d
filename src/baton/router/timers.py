"""The router's timers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterTimers:
    """Durations in seconds, on the router's own clock. An engine's answer renews its lease.

    - `check`: interval between questions to an engine.
    - `answer`: an engine that takes longer to answer gets new requests only if there is no other.
    - `lease`: an engine that is silent for this long is given up, and its legs continue elsewhere.
    - `patience`: how long a request that has begun waits for an engine that can continue it.
    - `connect`: for a leg's connection.
    - `tell`: for a vLLM server's answer to a question or message, which costs it one token.
    - `drain`: how long a leg whose request has ended is read, so that it ends by itself.
    """

    check: float = 0.5
    answer: float = 1.0
    lease: float = 5.0
    patience: float = 5.0
    connect: float = 3.0
    tell: float = 20.0
    drain: float = 5.0
