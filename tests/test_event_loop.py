"""The event loop of routers."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton import event_loop


async def loop_and_value(value: int) -> tuple[asyncio.AbstractEventLoop, int]:
    return asyncio.get_running_loop(), value


def test_routers_run_in_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    loop, value = event_loop.run(loop_and_value(3))
    assert isinstance(loop, uvloop.Loop)
    assert value == 3


async def elapsed_between_two_times() -> float:
    loop = asyncio.get_running_loop()
    began, until = loop.time(), time.monotonic() + 0.0003
    while time.monotonic() < until:
        pass
    return loop.time() - began


def test_the_clock_goes_on_within_an_iteration() -> None:
    assert event_loop.run(elapsed_between_two_times()) >= 0.0003
