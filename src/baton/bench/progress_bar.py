"""Progress of a benchmark: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

DELAY_S = 1.0  # none for a short benchmark


def progress_bar(total: int, unit: str, delay_s: float = DELAY_S) -> tqdm[None]:
    return tqdm(total=total, desc="Benchmark", unit=unit, delay=delay_s, leave=False, disable=None)


def with_progress(items: Sequence[T], unit: str, delay_s: float = DELAY_S) -> Iterator[T]:
    with progress_bar(len(items), unit, delay_s) as one:
        for item in items:
            yield item
            one.update()
