"""A router frees failed legs at once, without the garbage collector: their frames hold prompts and answers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

from testkit.servers.fake_serving import FakeEngine, until
from testkit.servers.fleets import Cluster, complete


def kept() -> list[str]:
    """Frames of the router that exceptions hold."""
    # `isinstance` asks a weak proxy for its class, which raises if its object is gone.
    tracebacks: list[TracebackType] = [one for one in gc.get_objects() if type(one) is TracebackType]
    codes = [one.tb_frame.f_code for one in tracebacks]
    return [f"{code.co_filename}:{code.co_name}" for code in codes if "/baton/router/" in code.co_filename]


async def freed(num_before: int) -> None:
    for _ in range(3000):
        if len(kept()) <= num_before:
            return
        await asyncio.sleep(0.02)
    assert kept()[num_before:] == []


def both(fail: str) -> Callable[[Cluster], None]:
    def change(cluster: Cluster) -> None:
        for engine in (*cluster.prefills, *cluster.decodes):
            engine.fail = fail

    return change


def one(role: str, fail: str) -> Callable[[Cluster], None]:
    def change(cluster: Cluster) -> None:
        engine: FakeEngine = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
        engine.fail = fail

    return change


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (both("refuse"), 400),
        (both("refuse leg"), 503),
        (both("down"), 503),
        (both("full"), 429),
        (both("nothing left"), 400),
        (one("decode", "handoff"), 500),
        (one("decode", "recoverable"), 200),
        (one("decode", "lost"), 200),
        (one("decode", "thread died"), 200),
        (one("decode", "reports"), 200),
        (one("decode", "mid-stream"), 500),
        (one("decode", "wrong"), 500),
        (one("decode", "refuse leg"), 200),
        (one("prefill", "refuse leg"), 200),
        (one("prefill", "down"), 200),
    ],
    ids=lambda value: None,
)
async def test_a_failed_leg_is_freed(directory: Path, change: Callable[[Cluster], None], status: int) -> None:
    cluster = Cluster(directory)
    change(cluster)
    async with cluster.run() as (url, session):
        gc.collect()
        before = len(kept())
        gc.disable()
        try:
            assert (await complete(session, url))[0] == status
            await freed(before)
        finally:
            gc.enable()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_leg_is_freed_whose_client_left(directory: Path, stream: bool) -> None:
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.pause = asyncio.Event()
    async with cluster.run() as (url, session):
        gc.collect()
        before = len(kept())
        gc.disable()
        try:
            asked = asyncio.create_task(complete(session, url, stream=stream))
            await until(lambda: any(engine.running for engine in cluster.decodes))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: not any(engine.running for engine in cluster.decodes))
            await freed(before)
        finally:
            gc.enable()
