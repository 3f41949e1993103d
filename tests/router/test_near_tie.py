"""Near-ties: their measurement must not outlive its request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.router.attempts import recovery
from baton.router.attempts.attempt import RequestProgress
from baton.router.attempts.join import Joined, TokenMismatch
from baton.router.routes import Decisions, Route
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest


async def test_a_client_that_leaves_as_a_near_tie_is_measured_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that coincides with the answer is not lost: otherwise the request would run for a client that is
    gone.
    """

    async def measure_gap(*_: Any) -> float:
        asyncio.get_running_loop().call_soon(task.cancel)
        return 0.0

    monkeypatch.setattr(recovery, "measure_gap", measure_gap)
    other: Any = None
    pool: Any = SimpleNamespace(timers=RouterTimers())
    attempts = recovery.AttemptRecovery(pool, other, other, Decisions(), lambda *_: None, near_tie=1.0)
    request = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    engine = cast(Any, SimpleNamespace(client=None))
    progress = RequestProgress(Joined(request), hand_off=False)

    async def serve() -> None:
        assert await attempts.after_mismatch(progress, Route("handed_off", engine, engine), TokenMismatch(0, 1, 2))
        await asyncio.sleep(3600)

    task = asyncio.create_task(serve())
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
