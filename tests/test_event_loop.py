"""The event loop of routers."""

from __future__ import annotations

import asyncio

import pytest

from baton import event_loop


async def loop_and_value(value: int) -> tuple[str, int]:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0], value


def test_routers_run_in_uvloop() -> None:
    pytest.importorskip("uvloop")
    assert event_loop.run(loop_and_value(3)) == ("uvloop", 3)
