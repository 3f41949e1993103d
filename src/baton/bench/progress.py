"""How far a benchmark is: a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

DELAY_S = 1.0  # a short benchmark shows none


def progress_bar(total: int, unit: str, delay_s: float = DELAY_S) -> tqdm[None]:
    """A bar on stderr for `total` units. It disappears at the end."""
    return tqdm(total=total, desc="Benchmark", unit=unit, delay=delay_s, leave=False, disable=None)


def with_progress(items: Sequence[T], unit: str, delay_s: float = DELAY_S) -> Iterator[T]:
    """The items, each counted when the next one is asked for."""
    with progress_bar(len(items), unit, delay_s) as one:
        for item in items:
            yield item
            one.update()
