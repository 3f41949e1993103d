from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterTimers:
    """Durations in seconds, on the router's clock. An engine's answer renews its lease.

    - `check`: between questions to an engine.
    - `answer`: an engine that answers later gets new requests only if there is no other.
    - `lease`: an engine silent for this long is given up.
    - `patience`: how long a begun request waits for an engine to continue it.
    - `connect`: for a leg's connection.
    - `tell`: for a vLLM server's answer to a message.
    - `trial`: before a refused pair is tried again.
    - `drain`: how long a leg may outlast its request.
    """

    check: float = 0.5
    answer: float = 1.5
    lease: float = 5.0
    patience: float = 5.0
    connect: float = 3.0
    tell: float = 20.0
    drain: float = 5.0
    trial: float = 30.0
