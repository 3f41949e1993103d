"""The metrics page of a deployment: the router's own metrics, and its engines' with labels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.errors import BatonError
from baton.router.pooled_engine import PooledEngine

T = TypeVar("T")


class Shared(Generic[T]):
    """A result that concurrent callers share, since computing one page asks every engine."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._task: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """The result in progress, or a new one. Raises the errors of `make`."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._task)


# The router reports vLLM's metrics per request; those of engines, per leg, are omitted.
_OWN = "vllm:"


async def deployment_metrics(own: Iterable[Metric], engines: Sequence[PooledEngine]) -> list[Metric]:
    """Engines' families get labels `engine` and `role`. Engines that do not answer with metrics are omitted."""
    pages = await asyncio.gather(*(_page(engine) for engine in engines))
    families = {family.name: family for family in own}
    mine = {name for name in families if name.startswith(_OWN)}
    for engine, page in zip(engines, pages, strict=True):
        for family in page:
            if family.name in mine:
                continue
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if into.type == family.type:
                into.samples += [_labelled(sample, engine.name, engine.role) for sample in family.samples]
    return list(families.values())


async def _page(engine: PooledEngine) -> list[Metric]:
    if not engine.healthy and not engine.draining:
        return []
    try:
        return list(text_string_to_metric_families(await engine.client.metrics_text()))
    except (BatonError, ValueError, KeyError, IndexError, OverflowError):
        return []


def _labelled(sample: Sample, engine: str, role: str) -> Sample:
    """Rename the engine's own labels `engine` and `role` to `exported_...`, as Prometheus does."""
    labels = {f"exported_{name}" if name in ("engine", "role") else name: text for name, text in sample.labels.items()}
    return sample._replace(labels={**labels, "engine": engine, "role": role})
