"""What a test gets of `baton verify` between two servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    """How the command ended."""

    code: int
    out: str
    err: str


Verify = Callable[..., Result]  # (reference, candidate, *flags)
