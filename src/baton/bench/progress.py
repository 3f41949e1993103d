"""How far a benchmark is: a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

_DELAY_S = 1.0  # a short benchmark shows none


def bar(total: int, unit: str) -> tqdm[None]:
    """A bar on stderr for `total` units. It disappears at the end."""
    return tqdm(total=total, desc="Benchmark", unit=unit, delay=_DELAY_S, leave=False, disable=None)


def shown(items: Sequence[T], unit: str) -> Iterator[T]:
    """The items, each counted when the next one is asked for."""
    with bar(len(items), unit) as one:
        for item in items:
            yield item
            one.update()
