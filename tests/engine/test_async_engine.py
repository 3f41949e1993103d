"""If an engine's thread dies, its streams, its router, and the peers of its handoffs learn of it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine import async_engine
from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from baton.engine.request import Request
from baton.engine.runner import ModelRunner
from baton.engine.step_plans import DraftPlan, DraftResult
from baton.errors import EngineUnavailableError, OverloadedError
from baton.handoff.protocol.ticket import load_or_create_key
from baton.sampling_params import SamplingParams
from testkit.engines import TARGET, request
from testkit.inside import engine_of, thread_of


async def test_the_death_of_the_engine_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file = str(tmp_path / "ticket.key")
    load_or_create_key(key_file)
    transfer = KVTransferConfig(kv_transport="local://")
    engine = AsyncEngine(EngineConfig(model=TARGET, ticket_key_file=key_file, kv_transfer_config=transfer))
    core, agent = engine_of(engine).core, engine_of(engine).agent
    assert agent is not None

    def fail() -> bool:
        raise RuntimeError("out of luck")

    engine.start()
    try:
        assert engine.load().num_running == 0
        monkeypatch.setattr(core, "step", fail)
        with pytest.raises(EngineUnavailableError, match="RuntimeError"):
            async for _ in engine.generate(request("r", [1, 2], SamplingParams(max_tokens=3))):
                pass
        with pytest.raises(EngineUnavailableError, match="RuntimeError"):
            engine.load()
        # If the agent stayed alive, peers would wait for this engine until their tickets expire.
        await asyncio.wait_for(asyncio.to_thread(thread_of(agent).join), 60.0)
    finally:
        engine.close()


def test_an_engine_whose_first_request_fails_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it can compute others."""
    calls, forward = [0], ModelRunner.forward

    def fail_once(self: ModelRunner, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("out of luck")
        return forward(self, *arguments)

    monkeypatch.setattr(ModelRunner, "forward", fail_once)
    with pytest.raises(EngineUnavailableError, match="first request failed"):
        AsyncEngine(EngineConfig(model=TARGET))


async def test_no_request_waits_for_a_thread_that_died_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread dies between the check that the engine lives and the registration of the request's stream."""
    engine = AsyncEngine(EngineConfig(model=TARGET))
    core = engine_of(engine).core

    def fail() -> bool:
        raise RuntimeError("out of luck")

    whole = async_engine.make_request

    def make_request(*arguments: Any) -> Request:
        core.post(lambda: None)
        thread_of(engine).join(60)
        return whole(*arguments)

    engine.start()
    try:
        monkeypatch.setattr(core, "step", fail)
        monkeypatch.setattr(async_engine, "make_request", make_request)
        with pytest.raises(EngineUnavailableError, match="RuntimeError"):
            await asyncio.wait_for(anext(engine.generate(request("r", [1, 2], SamplingParams(max_tokens=3)))), 60)
        assert engine._queue.num_waiting == 0
    finally:
        engine.close()


async def test_the_drafter_waits_until_the_loop_has_sent_the_first_token() -> None:
    drafter = SpeculativeConfig("eagle3", model="models/baton-demo-eagle3", num_speculative_tokens=3)
    engine = AsyncEngine(EngineConfig(model=TARGET, speculative_config=drafter))
    executor, order = engine_of(engine).core.executor, list[str]()
    draft = executor.draft

    def noted(plan: DraftPlan) -> DraftResult:
        order.append("drafts")
        return draft(plan)

    executor.draft = noted
    engine.send_wait_s = 60.0
    engine.start()
    try:
        async for _ in engine.generate(request("r", [1, 2], SamplingParams(max_tokens=4, ignore_eos=True))):
            await asyncio.sleep(0.05)  # a client that is slow to read
            order.append("sent")
    finally:
        engine.close()
    assert order[:2] == ["sent", "drafts"]


async def test_a_full_queue_refuses_at_once_and_takes_what_goes_on() -> None:
    """A request that already had tokens is accepted: its client has them too."""
    engine = AsyncEngine(EngineConfig(model=TARGET, max_queued_requests=1))
    engine.start()
    try:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        first = engine.generate(request("first", [1, 2], params))
        waiting = asyncio.create_task(anext(first))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 requests wait already"):
            await anext(engine.generate(request("second", [1, 2], params)))
        resumed = msgspec.structs.replace(request("third", [1, 2, 5], params), num_prompt_tokens=2)
        goes_on = asyncio.create_task(anext(engine.generate(resumed)))
        assert (await waiting).token_ids
        assert (await goes_on).token_ids
        await first.aclose()
        async for _ in engine.generate(request("fourth", [1, 2], params)):
            pass
        assert engine._queue.num_waiting == 0
    finally:
        engine.close()


async def test_a_request_id_that_is_used_again_at_once_gets_its_own_tokens_alone() -> None:
    """The engine's thread reports the first request's end after the second has arrived."""
    engine = AsyncEngine(EngineConfig(model=TARGET))
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    engine.start()
    try:
        alone = [chunk async for chunk in engine.generate(request("alone", [3, 4], params))]
        first = engine.generate(request("same", [1, 2], params))
        await anext(first)
        held = threading.Event()
        engine_of(engine).core.post(lambda: (held.wait(60), None)[1])
        await first.aclose()
        second = engine.generate(request("same", [3, 4], params))
        begun = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        held.set()
        chunks = [await begun] + [chunk async for chunk in second]
        assert [t for c in chunks for t in c.token_ids] == [t for c in alone for t in c.token_ids]
        assert chunks[-1].finish_reason == "length"
    finally:
        engine.close()
