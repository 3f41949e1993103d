"""An engine whose thread dies says so to everyone: its streams, its router, and the peers of its handoffs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engines import TARGET, request

from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig, KVTransferConfig
from baton.errors import EngineUnavailableError
from baton.handoff.ticket import load_or_create_key
from baton.wire import SamplingParams


async def test_the_death_of_the_engine_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file = str(tmp_path / "ticket.key")
    load_or_create_key(key_file)
    transfer = KVTransferConfig(kv_transport="local://")
    engine = AsyncEngine(EngineConfig(model=TARGET, ticket_key_file=key_file, kv_transfer_config=transfer))
    core, agent = engine._engine.core, engine._engine.agent
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
        # With its agent alive, peers would wait for this engine until their tickets expire.
        await asyncio.wait_for(asyncio.to_thread(agent._thread.join), 10.0)
    finally:
        engine.close()
