"""The result of `baton verify` between two servers, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    code: int
    out: str
    err: str


Verify = Callable[..., Result]  # (reference, candidate, *flags)
