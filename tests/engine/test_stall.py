"""An engine whose thread hangs tells everything that would wait for it: health checks, clients, router and peers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig
from baton.errors import ConfigError, EngineStalledError
from baton.sampling_params import SamplingParams
from testkit.engines import TARGET, pair, request, stepped
from testkit.inside import engine_of

LIMIT_S = 60.0
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=1, ignore_eos=True)


async def until_stalled(engine: AsyncEngine, stalled: bool) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            engine.load()
        except EngineStalledError:
            if stalled:
                return
        else:
            if not stalled:
                return
        await asyncio.sleep(0.02)
    raise AssertionError(f"stalled is not {stalled}")


async def test_a_thread_that_hangs_is_told_and_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(EngineConfig(model=TARGET, stall_timeout_s=1.0))
    core = engine_of(engine).core
    go_on = threading.Event()
    whole = core.step

    def hang() -> bool:
        go_on.wait(LIMIT_S)
        return whole()

    async def ask() -> list[int]:
        stream = engine.generate(request("r", [1, 2, 3], PARAMS))
        return [token async for chunk in stream for token in chunk.token_ids]

    engine.start()
    try:
        engine.load()  # idle is not stalled, for any time
        monkeypatch.setattr(core, "step", hang)
        asked = asyncio.create_task(ask())
        await until_stalled(engine, True)
        with pytest.raises(EngineStalledError):
            await anext(engine.generate(request("other", [1], PARAMS)))
        go_on.set()
        assert len(await asyncio.wait_for(asked, LIMIT_S)) == 8
        await until_stalled(engine, False)
    finally:
        go_on.set()
        engine.close()


def test_idle_time_and_short_turns_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with stepped() as one:
        core = one.core
        now[0] += 1000.0
        assert core.mailbox.busy_s() == 0.0
        core.post(lambda: None)
        now[0] += 7.0
        assert core.mailbox.busy_s() == 7.0  # no thread takes it
        seen: list[float] = []

        def slow() -> None:
            now[0] += 5.0
            seen.append(core.mailbox.busy_s())

        core.post(slow)
        core.stop()  # so that the iteration does not sleep at its end
        core.turn()
        assert seen == [5.0]
        assert core.mailbox.busy_s() == 0.0


def test_calls_are_taken_while_others_look_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call must not disappear between the check for one and the access."""

    class Calls(deque[Any]):
        def popleft(self) -> Any:
            assert core.mailbox._wake._is_owned()  # type: ignore[attr-defined]
            return super().popleft()

    with stepped() as one:
        core = one.core
        monkeypatch.setattr(core.mailbox, "_posted", Calls())
        done: list[int] = []
        core.post(lambda: done.append(1))
        core.drain()
        assert done == [1]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_decode_engine_waits_for_no_prefill_engine_that_hangs(tmp_path: Path, mode: Any) -> None:
    """The prefill engine's agent lives, renews its lease, and reports that nothing will come."""
    prompt = list(range(5, 55))
    with stepped() as alone:
        expected = alone.run("r", prompt, PARAMS).result
    with pair(tmp_path, {"stall_timeout_s": 60.0}, stall_timeout_s=0.2) as engines:
        _, decoded = engines.legs("r", prompt, PARAMS, mode)
        engines.prefill.core.post(lambda: None)  # it is never taken: this engine does not step
        deadline = time.monotonic() + LIMIT_S
        while not decoded.ended:
            assert time.monotonic() < deadline
            if not engines.decode.step():
                time.sleep(0.001)
        assert decoded.result == expected
        assert engines.decode.core.metrics.handoff_failures == {"engine_stalled": 1}
        engines.settle()  # the hanging engine's agent has freed what it can, once the engine steps again


def test_the_timeout_is_checked() -> None:
    with pytest.raises(ConfigError, match="stall_timeout_s"):
        EngineConfig(model=TARGET, stall_timeout_s=0.0).check()
